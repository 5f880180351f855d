"""What makes a rehearsal cheap: models without values, and torch without its compiler."""

import sys
import types

import pytest
import torch
from torch import nn

from flatparam.planning.hollow.blank import Blank
from flatparam.planning.hollow.compiler import StandIn, without_compiler

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
        assert stands.disable(function) is function
        stands.graph_break("of no consequence")
        vars(function)["__dynamo_disable"] = function
        assert not stands.was_needed
    assert COMPILER not in sys.modules
    assert "__dynamo_disable" not in vars(function)


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
        "flatparam.planning.hollow.compiler.importlib",
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
