"""discover: which parameters a module has, through which attributes, and under which names."""

import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamError, ParamInfo, clean_fqn, discover, each_module


def found(root: nn.Module, **options: object) -> list[str]:
    return [bound.infos[0].fqn for bound in discover(root, **options)]  # type: ignore[arg-type]  # passed on


class Nested(nn.Module):
    """Parameters before and after children, a None parameter and a None child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.child = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.register_parameter("absent", None)
        self.register_module("nobody", None)
        self.last = nn.Parameter(torch.zeros(1))


@each_row("make", [Nested, lambda: nn.Transformer(4, 2, 1, 1, 4, batch_first=True), lambda: nn.LSTM(2, 2, 2)])
def test_order_and_names_are_those_of_named_parameters(make: type[nn.Module]) -> None:
    """The parameters come in the order and under the names of ``named_parameters()``."""
    module = make()
    assert found(module) == [name for name, _ in module.named_parameters()]
    assert [bound.parameter for bound in discover(module)] == list(module.parameters())


def test_every_name_of_a_tied_parameter() -> None:
    """A tied parameter is found once, with every attribute that holds it."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[2].weight = module[0].weight
    tied = discover(module)[0]
    assert [info.fqn for info in tied.infos] == ["0.weight", "1.weight", "2.weight"]
    assert tied.spec.aliases == ("1.weight", "2.weight")


def test_every_name_of_a_shared_module() -> None:
    """A module that is reached by two paths gives its parameters both names, as its state dict does."""
    shared = nn.Linear(2, 2)
    module = nn.ModuleDict({"a": shared, "b": shared})
    found = discover(module)
    names = [name for bound in found for name in (bound.spec.fqn, *bound.spec.aliases)]
    assert sorted(names) == sorted(module.state_dict())
    assert [len(bound.infos) for bound in found] == [1, 1]


def test_ignored_parameters_are_compared_by_identity() -> None:
    """An ignored parameter is left out; an equal one is not."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        module[1].weight.copy_(module[0].weight)
    assert found(module, ignored_parameters=[module[0].weight]) == ["1.weight"]


def test_skipped_modules_are_left_out_with_all_below_them() -> None:
    """A skipped submodule is left out with its children, also if it is shared; the root is never skipped."""
    inner = nn.Sequential(nn.Linear(1, 1))
    module = nn.Sequential(inner, nn.Linear(1, 1), nn.ModuleList([inner]))
    assert found(module, skip_module=lambda m: m is inner) == ["1.weight", "1.bias"]
    assert found(module, skip_module=lambda m: m is module) == found(module)


def test_names_are_clean_of_wrappers() -> None:
    """Names leave out what sharding, checkpoint and compile wrappers put between."""
    inner = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(1, 1, bias=False)})
    module = nn.ModuleDict({"block": nn.ModuleDict({"_fsdp_wrapped_module": inner})})
    assert found(module) == ["block.weight"]
    assert clean_fqn("_fsdp_wrapped_module._orig_mod.block._checkpoint_wrapped_module.weight") == "block.weight"
    assert clean_fqn("my_orig_mod.weight") == "my_orig_mod.weight"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Lazy modules:UserWarning")
@each_row(
    ("make", "told"),
    [
        (
            lambda: torch.jit.script(nn.Linear(1, 1)),
            "'0.weight' belongs to TorchScript.*leave the module whole",
        ),
        (
            lambda: nn.LazyLinear(1),
            "'0.weight' has no shape yet, since its LazyLinear was not called; call the",
        ),
    ],
)
def test_parameters_that_cannot_be_taken(make: Callable[[], nn.Module], told: str) -> None:
    """Parameters of TorchScript, and those that have no shape yet, are refused by name; they can be left out."""
    odd = make()
    module = nn.Sequential(odd, nn.Linear(1, 1))
    with pytest.raises(FlatParamError, match=told):
        found(module)
    assert found(module, skip_module=lambda m: m is odd) == ["1.weight", "1.bias"]


def test_a_binding_holds_its_module_weakly() -> None:
    """A binding whose module is gone has a stand-in from then on, and warns of it once."""
    info = ParamInfo("weight", "block.0", weakref.ref(nn.Linear(1, 1)))
    assert info.fqn == "block.0.weight"
    assert info.is_gone
    with pytest.warns(UserWarning, match=r"the module 'block\.0' was taken out of the model"):
        stand_in = info.module
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert info.module is info.reference() is stand_in
    assert [*stand_in.parameters()] == []


def test_each_module_in_torchs_order() -> None:
    """Modules come once, in the order of `modules()`, also if they are shared, missing or contain themselves."""
    shared = nn.Linear(1, 1)
    root = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared))
    root.register_module("nobody", None)
    root[1].add_module("above", root)
    assert list(each_module(root)) == list(root.modules())


def test_modules_that_are_skipped() -> None:
    """A skipped module is left out with all below it, unless another path leads there; the root is never skipped."""
    shared = nn.Linear(1, 1)
    root = nn.Sequential(nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"again": shared}))
    found = list(each_module(root, lambda module: isinstance(module, nn.Sequential)))
    assert found == [root, root[1], shared]


def test_a_module_that_contains_itself_below() -> None:
    """A module that is its own descendant is searched once, without end."""
    module = nn.Sequential(nn.Linear(1, 1))
    module.add_module("again", module)
    assert found(module) == ["0.weight", "0.bias"]
