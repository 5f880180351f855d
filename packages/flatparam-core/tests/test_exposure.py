"""The tensors under a sharded module's parameter names, and what ``parameters()`` lists, for both exposures."""

import gc
import weakref

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParameter, flatten_module

from .ranks import Ranks, flatten_alone, gather, seeded


class Tied(nn.Module):
    """An embedding whose weight is the output projection too, and a module that is reached by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return found


class Containers(nn.Module):
    """Parameters in a list, in a dict, 0-d, and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 2))
        self.items = nn.ParameterList([torch.randn(3), torch.randn(2, 3)])
        self.table = nn.ParameterDict({"x": torch.randn(3, 1), "y": torch.randn(1)})
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self.items:
            x = x + item.sum()
        for value in self.table.values():
            x = x * value.mean()
        return x @ self.first * self.scale


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def slice_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[start:stop]


def test_sharded_attributes_are_safe_to_touch(use_orig_params: bool) -> None:
    """While sharded, each name reads as this rank's elements in order, of the right dtype and device.

    A plain view is 1-D; an original keeps its number of dimensions.
    """
    full = seeded(lambda: nn.Linear(3, 5))
    assert isinstance(full, nn.Linear)
    ranks = Ranks(lambda: nn.Linear(3, 5), 3, use_orig_params=use_orig_params)
    for round_ in range(2):
        for rank, module in enumerate(ranks.modules):
            layout = ranks.handles[rank][0].layout
            for index, name in enumerate(layout.fqns):
                part = layout.fragment(index, rank).in_param
                shown = getattr(module, name)
                assert shown.dim() == (getattr(full, name).dim() if use_orig_params else 1)
                assert (shown.dtype, shown.device) == (torch.float32, torch.device("cpu"))
                assert torch.equal(shown.flatten(), slice_of(getattr(full, name), part.start, part.stop)), (
                    round_,
                    rank,
                    name,
                )
        ranks.unshard()
        ranks.reshard()


def test_unsharded_attributes_are_the_leaves(use_orig_params: bool) -> None:
    """While unsharded, each name reads as its leaf: a parameter of the original shape, strides and values."""
    make = lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # noqa: E731
    full = seeded(make)
    ranks = Ranks(make, 2, use_orig_params=use_orig_params)
    ranks.unshard()
    for module, (handle,) in zip(ranks.modules, ranks.handles, strict=True):
        for name, leaf in zip(handle.layout.fqns, handle.leaves, strict=True):
            assert getattr(module, name) is leaf
            assert leaf.is_leaf
            assert torch.equal(leaf, getattr(full, name))
            assert leaf.stride() == getattr(full, name).stride()


def test_flat_exposure_lists_the_flat_parameter() -> None:
    """With use_orig_params=False, a sharded module lists its flat parameters and nothing else."""
    module = Tied()
    handle = flatten_alone(module)
    assert names(module) == ["_flat_param"]
    assert next(module.parameters()) is handle.flat_param
    assert isinstance(handle.flat_param, FlatParameter)
    assert handle.exposure.parameters() == (handle.flat_param,)


def test_original_exposure_lists_the_original_objects() -> None:
    """With use_orig_params=True, a sharded module lists the objects and names that it always listed, in order."""
    module = Containers()
    before = list(module.named_parameters())
    handle = flatten_alone(module, use_orig_params=True)
    after = list(module.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(now is then for (_, now), (_, then) in zip(after, before, strict=True))
    by_name = dict(before)
    held = zip(handle.layout.fqns, handle.exposure.parameters(), strict=True)
    assert all(now is by_name[fqn] for fqn, now in held)
    assert set(handle.layout.fqns) == set(by_name)


@each_row("make", [Tied, Containers, lambda: nn.LSTM(2, 3, 2)], ids=["tied", "containers", "lstm"])
def test_names_keep_their_order(make: type[nn.Module], use_orig_params: bool) -> None:
    """In every state and after any number of cycles, the originals are listed in the module's own order."""
    module = make()
    wanted = names(module)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    sharded = names(module)
    for _ in range(3):
        gather([handle])
        assert [name for name in names(module) if name != "_flat_param"] == wanted
        handle.reshard()
        assert names(module) == sharded


def test_a_flat_parameter_can_be_hidden_while_the_originals_show() -> None:
    """list_flat_parameter takes the flat parameter out of ``parameters()`` and puts it back."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gather([handle])
    assert names(module) == ["weight", "bias", "_flat_param"]
    handle.exposure.list_flat_parameter(False)
    assert names(module) == ["weight", "bias"]
    handle.exposure.list_flat_parameter(True)
    handle.reshard()
    assert names(module) == ["_flat_param"]


def test_tied_parameters_are_one_object_under_every_name(use_orig_params: bool) -> None:
    """A tied parameter lies in the flat parameter once, and both names read as one object in every state."""
    module = Tied()
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    assert handle.layout.fqns == ("embed.weight", "norm.weight", "norm.bias")
    assert handle.layout.slots[0].spec.aliases == ("head.weight",)
    for _ in range(2):
        assert module.head.weight is module.embed.weight
        gather([handle])
        assert module.head.weight is module.embed.weight is handle.leaves[0]
        handle.reshard()


def test_containers_and_lstm_read_through(use_orig_params: bool) -> None:
    """ParameterList, ParameterDict and LSTM, which keep their own books, compute as before, cycle after cycle."""
    tokens = torch.randn(2, 2)
    for make, inputs in ((Containers, tokens), (lambda: nn.LSTM(2, 3, 2, bidirectional=True), tokens)):
        reference = seeded(make)
        ranks = Ranks(make, 2, use_orig_params=use_orig_params)
        for _ in range(3):
            ranks.unshard()
            for module in ranks.modules:
                out, wanted = module(inputs), reference(inputs)
                if isinstance(out, tuple):
                    out, wanted = out[0], wanted[0]
                assert torch.equal(out, wanted)
            ranks.reshard()


def test_an_lstm_keeps_no_second_reference_to_full_weights(use_orig_params: bool) -> None:
    """While sharded, the list that an LSTM keeps of its weights holds none of the freed leaves."""
    module = nn.LSTM(2, 3)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    assert [id(weight) for weight in module._flat_weights] == [id(leaf) for leaf in handle.leaves]
    handle.reshard()
    assert not {id(weight) for weight in module._flat_weights} & {id(leaf) for leaf in handle.leaves}


def test_a_module_with_its_own_setattr_is_told() -> None:
    """A module class that overrides __setattr__ sees each change of its parameters."""

    class Watching(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            self.__dict__.setdefault("seen", []).append(name)
            super().__setattr__(name, value)

    module = Watching(2, 2)
    handle = flatten_alone(module)
    # The first time they are shown several times, to count who refers to them.
    gather([handle])
    handle.reshard()
    module.__dict__["seen"].clear()
    gather([handle])
    assert module.__dict__["seen"] == ["weight", "bias"]
    assert module.weight is handle.leaves[0]
    handle.reshard()
    assert module.weight.shape == (4,)


def test_writing_into_a_sharded_attribute_reaches_the_shard(use_orig_params: bool) -> None:
    """While sharded, an in-place change under a parameter's name is a change of the shard, and of the next unshard."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    with torch.no_grad():
        module.bias.fill_(3.0)
        module.weight.mul_(0.0)
    gather([handle])
    assert module.bias.tolist() == [3.0, 3.0]
    assert not module.weight.any()


def test_notes_on_parameters_move_to_the_leaves(use_orig_params: bool) -> None:
    """Attributes that a library set on a parameter object can be read from what the module shows while unsharded."""
    module = nn.Linear(2, 2)
    module.weight.no_weight_decay = True  # type: ignore[assignment]  # as libraries do
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    assert module.weight.no_weight_decay is True
    assert not hasattr(module.bias, "no_weight_decay")


@pytest.mark.parametrize("wanted", [False, True])
def test_requires_grad_is_followed(wanted: bool, use_orig_params: bool) -> None:
    """Freezing or thawing what ``parameters()`` lists takes effect at the next unshard, both ways."""
    module = nn.Linear(2, 2).requires_grad_(not wanted)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    assert [leaf.requires_grad for leaf in handle.leaves] == [not wanted] * 2
    handle.reshard()
    module.requires_grad_(wanted)
    gather([handle])
    assert [leaf.requires_grad for leaf in handle.leaves] == [wanted] * 2


def test_requires_grad_of_one_original() -> None:
    """With the original parameters, one of a unit can be frozen while the others train."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    module.bias.requires_grad_(False)
    gather([handle])
    module(torch.ones(1, 2)).sum().backward()
    assert [leaf.grad is not None for leaf in handle.leaves] == [True, False]


def test_handles_do_not_keep_modules_alive(use_orig_params: bool) -> None:
    """A handle holds its module weakly: the module goes when its user drops it, and a use of the handle says so."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    with pytest.warns(UserWarning, match="was taken out of the model"):
        gather([handle])


@each_row("when", ["sharded", "gathered"])
def test_a_module_is_taken_out(when: str, use_orig_params: bool) -> None:
    """Its parameters stay in the flat parameter, with their values; the others go on as before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    handle = flatten_alone(model, use_orig_params=use_orig_params)
    if when == "gathered":
        gather([handle])
    model[1] = nn.Identity()
    with pytest.warns(UserWarning, match="the module '1' was taken out of the model"):
        handle.reshard() if when == "gathered" else gather([handle])
    for _ in range(2):
        if handle.is_unsharded:
            handle.reshard()
        gather([handle])
        assert model[0].weight is handle.leaves[0]
        leaves = dict(zip(handle.layout.fqns, handle.leaves, strict=True))
        assert all(torch.equal(leaf, before[fqn]) for fqn, leaf in leaves.items())
    model(torch.ones(1, 2)).sum().backward()
    assert {fqn for fqn, leaf in leaves.items() if leaf.grad is not None} == {"0.weight", "0.bias"}
    handle.reshard()


def test_several_flat_parameters_stand_side_by_side() -> None:
    """Frozen parameters and those of a different dtype get flat parameters of their own names in the owner."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).requires_grad_(False))
    handles = flatten_module(module, rank=0, world_size=1)
    assert names(module) == ["_flat_param", "_flat_param_1", "_flat_param_2"]
    assert [(h.flat_param.dtype, h.flat_param.requires_grad) for h in handles] == [
        (torch.float32, True),
        (torch.float64, True),
        (torch.float32, False),
    ]
