"""What makes a rehearsal cheap: models without values, and torch without its compiler."""

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam_comm.testing import PATIENCE
from flatparam_plan.hollow.blank import Blank, StandIn, without_compiler
from flatparam_plan.hollow.unwatched import adds_in_place, owners_if_alone

COMPILER = "torch._dynamo"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not imported the compiler."""
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)


def test_a_blank_model_on_the_meta_device_has_its_shapes() -> None:
    """Initialisers give back the tensor that they were given, by place and by name, and count nothing."""
    with Blank(), torch.device("meta"):
        layer = nn.Linear(3, 5)
        weight = layer.weight
        assert nn.init.xavier_uniform_(tensor=weight) is weight
        assert weight.data.normal_(std=2.0).shape == (5, 3)
    assert layer.weight.is_meta


def test_a_blank_model_on_the_cpu_has_its_values() -> None:
    """What is on the CPU is filled as without the mode, from the same generator."""
    torch.manual_seed(3)
    plain = nn.Linear(3, 5)
    torch.manual_seed(3)
    with Blank():
        same = nn.Linear(3, 5)
    assert torch.equal(plain.weight, same.weight)
    assert torch.equal(plain.bias, same.bias)


def test_blank_leaves_other_functions_alone() -> None:
    """Only initialisers are left out: a view of a meta tensor is another tensor."""
    with Blank():
        ones = torch.ones(2, device="meta")
        assert ones.view(1, 2).shape == (1, 2)
        assert torch.zeros(2).normal_().abs().sum() > 0


@pytest.mark.usefixtures("no_compiler")
def test_the_stand_in_leaves_a_function_as_it_is() -> None:
    """Inside, `torch._dynamo` is the stand-in, whose `disable` gives the function back; afterwards it is gone."""

    def function() -> int:
        return 3

    with without_compiler() as stands:
        assert sys.modules[COMPILER] is stands
        assert stands is not None
        assert stands.disable(function, True, wrapping=False) is function
        stands.graph_break("of no consequence")
        vars(function)["__dynamo_disable"] = function
        assert not stands.was_needed
    assert COMPILER not in sys.modules
    assert "__dynamo_disable" not in vars(function)


KEEPS_FUNCTIONS = """
import torch
from flatparam_plan.hollow.blank import without_compiler

def first(x):
    return x + 1

def second(x):
    return x + 2

with without_compiler() as stands:
    kept = torch.compiler.disable(first, reason="it changes a cache")
    decorated = torch.compiler.disable(recursive=False)(second)
    assert not stands.was_needed

compiled = []

def count(graph, inputs):
    compiled.append(graph)
    return graph.forward

for function in (kept, decorated):
    assert torch.equal(torch.compile(function, backend=count)(torch.ones(2)), function(torch.ones(2)))
assert compiled == []
torch.compile(lambda x: x + 3, backend=count)(torch.ones(2))
assert len(compiled) == 1
"""


@pytest.mark.processes
def test_a_module_imported_inside_keeps_its_functions_from_the_compiler() -> None:
    """`torch.compiler.disable` in any of its forms works inside; the compiler leaves the function alone afterwards.

    In a process of its own, since the compiler must not have been imported before.
    """
    command = [sys.executable, "-W", "ignore", "-c", KEEPS_FUNCTIONS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_compiler_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands for a compiler that was imported before."""
    there = types.ModuleType(COMPILER)
    monkeypatch.setitem(sys.modules, COMPILER, there)
    with without_compiler() as stands:
        assert stands is None
        assert sys.modules[COMPILER] is there
    assert sys.modules[COMPILER] is there


@pytest.mark.usefixtures("no_compiler")
def test_who_needs_the_compiler_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attribute is the compiler's own, and the stand-in says that it was needed; names of import are not."""
    there = types.ModuleType(COMPILER)
    there.is_compiling = "the compiler's"  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "flatparam_plan.hollow.blank.importlib",
        types.SimpleNamespace(import_module={COMPILER: there}.__getitem__),
    )
    with without_compiler() as stands:
        assert isinstance(stands, StandIn)
        with pytest.raises(AttributeError):
            _ = stands.__wrapped__
        assert not stands.was_needed
        assert stands.is_compiling == "the compiler's"
        assert stands.was_needed
        assert COMPILER not in sys.modules


@pytest.mark.usefixtures("no_compiler")
def test_checkpointing_needs_no_compiler() -> None:
    """The setting that it asks for is there, so a plan with recomputed activations imports no compiler."""
    layer, x = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    with without_compiler() as stands:
        assert stands is not None
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert not stands.was_needed
    assert COMPILER not in sys.modules


@pytest.mark.usefixtures("no_compiler")
def test_other_settings_are_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for as if nothing stood for it."""
    there = types.ModuleType(COMPILER)
    there.config = types.SimpleNamespace(cache_size_limit=8)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "flatparam_plan.hollow.blank.importlib",
        types.SimpleNamespace(import_module={COMPILER: there}.__getitem__),
    )
    with without_compiler() as stands:
        assert stands is not None
        assert stands.config.cache_size_limit == 8
        stands.config.cache_size_limit = 9
        assert there.config.cache_size_limit == 9
        assert stands.was_needed


def sums_in_backward(make_loss: Callable[[Tensor], Tensor]) -> list[bool]:
    """For each sum of two tensors in a backward pass, whether it was said to be one that autograd writes in place."""
    said: list[bool] = []
    alone = owners_if_alone()

    class Watches(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Otherwise another function of torch stands between.
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.add.Tensor:
                said.append(adds_in_place(args, kwargs or {}, alone))
            return func(*args, **(kwargs or {}))

    loss = make_loss(torch.ones(2, 3, requires_grad=True))
    with Watches():
        loss.backward()
    return said


def test_gradients_of_two_uses_are_added_in_place() -> None:
    """Of three uses the second and the third gradient are written to the first."""
    assert sums_in_backward(lambda x: (x.sin() * x.cos() * x.exp()).sum()) == [True, True]


def test_a_gradient_that_somebody_else_has_is_not_written_to() -> None:
    """Both operands of a sum get one gradient."""
    assert sums_in_backward(lambda x: ((y := x * 2) + y).sum()) == [False]


class Adds(torch.autograd.Function):
    """A function of a user, which adds in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1 + gradients[0] * 1


def test_what_a_users_function_adds_is_new() -> None:
    """Its sum is a new tensor, though nobody else has its operands."""
    assert sums_in_backward(lambda x: Adds.apply(x).sum()) == [False]


def test_a_sum_outside_of_a_backward_pass_is_new() -> None:
    """Nothing is in place there."""
    assert not adds_in_place((torch.ones(2), torch.ones(2)), {}, owners_if_alone())
