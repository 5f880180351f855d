"""A state whose tensors have the shapes of a different model is refused; one that has shapes of its own is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives
from flatparam_runtime import FlatParamError
from flatparam_state import load_model_state, load_optimizer_state, model_state_dict, optimizer_state_dict

from .optimizers import OPTIMIZERS, Make, adam
from .worlds import assert_same_tensor, made_up_gradients, named_state, same_on_all, shard, step


class Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(float(size)))


def vector(size: int) -> nn.Module:
    return Vector(size)


def layers(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, size), nn.Linear(size, 3))


def matrices(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size + 1, bias=False) for _ in range(3)))


def saved(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> Any:
    """The unsharded optimizer's state, by name, after one step."""
    optimizer = make(model.parameters())
    step(model, optimizer, made_up_gradients(model, 0))
    return named_state(model, optimizer)


def refusals(
    model: Callable[[], nn.Module], make: Make, state: Any, use_orig_params: bool, *, rank0_only: bool = False
) -> list[str]:
    """What each of two ranks is told; its optimizer must be as before."""

    def rank(ranks: Collectives) -> str:
        sharded = shard(model(), ranks, use_orig_params=use_orig_params)
        optimizer = make(sharded.parameters())
        before = str(optimizer.state_dict())
        given = {} if rank0_only and ranks.rank else copy.deepcopy(state)
        with pytest.raises(FlatParamError) as caught:
            load_optimizer_state(sharded, optimizer, given, rank0_only=rank0_only)
        assert str(optimizer.state_dict()) == before
        return str(caught.value)

    return same_on_all(2, rank)


class OtherAdam(torch.optim.Adam):
    """An optimizer that is not one of torch's."""


STATEFUL = [name for name in OPTIMIZERS if name not in ("SGD", "ASGD")]


@each_row("rank0_only", [False, True])
@each_row(("build", "sizes"), [(vector, (8, 16)), (layers, (5, 6))])
@each_row("name", [*STATEFUL, "not of torch"])
def test_the_state_of_a_model_with_other_shapes(
    name: str, build: Any, sizes: tuple[int, int], rank0_only: bool, use_orig_params: bool
) -> None:
    """Every rank is told a state, a parameter and both shapes, in words and without a tensor's elements."""
    make = OPTIMIZERS.get(name, OtherAdam)
    state = saved(build(sizes[0]), make)
    wrong = {"p"} if build is vector else {"0.weight", "0.bias", "1.weight"}
    messages = refusals(lambda: build(sizes[1]), make, state, use_orig_params, rank0_only=rank0_only)
    for message in messages:
        assert "a different model" in message
        assert any(f"of {fqn!r}" in message for fqn in wrong)
        assert "expected a tensor of shape (" in message
        assert ", found shape (" in message
        assert "tensor(" not in message


def test_values_that_one_flat_parameter_cannot_have_are_not_printed() -> None:
    """If two parameters of one flat parameter have different tensors, the message has their shapes."""
    state = saved(layers(5), adam)
    for number, values in enumerate(state["state"].values()):
        values["table"] = torch.full((100,), float(number))
    for message in refusals(lambda: layers(5), adam, state, False):
        assert "'table' is a tensor of shape (100,)" in message
        assert "tensor([" not in message


class _Custom(torch.optim.Optimizer):
    """An optimizer whose states have shapes of their own."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() == 2:
                    self.state[parameter] = self.states(parameter)

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        raise AssertionError("each subclass has its own")


class Factors(_Custom):
    """Row and column factors, as Adafactor has them."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg_sq_row": parameter.sum(1), "exp_avg_sq_col": parameter.sum(0)}


class Covers(_Custom):
    """As many dimensions as the parameter, of which all but one have the size 1, as SM3 has them."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "accumulator_0": parameter.sum(1, keepdim=True),
            "accumulator_1": parameter.sum(0, keepdim=True),
        }


class Squares(_Custom):
    """A square matrix for each dimension, as Shampoo has them."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"precond_0": parameter @ parameter.t(), "precond_1": parameter.t() @ parameter}


class Scalars(_Custom):
    """One number under a usual name, as NovoGrad has it."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg_sq": parameter.norm()}


class Projected(_Custom):
    """A moment of low rank under a usual name, as GaLore has it."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg": parameter[:2] * 1, "exp_avg_sq": parameter[:2] ** 2}


class Bytes(_Custom):
    """Codes for elements, scales for blocks of them, and a table."""

    def states(self, parameter: torch.Tensor) -> dict[str, Any]:
        scales = torch.stack([part.abs().max() for part in parameter.reshape(-1).split(4)])
        return {"codes": parameter.to(torch.int8), "absmax": scales, "qmap": torch.arange(9.0)}


@each_row("kind", [Factors, Covers, Squares, Scalars, Projected, Bytes, torch.optim.Adafactor])
def test_states_with_shapes_of_their_own_are_loaded(kind: Any) -> None:
    """What an optimizer keeps for whole parameters, in whatever shape, comes back as it was saved."""

    def rank(ranks: Collectives) -> None:
        model = shard(matrices(4), ranks, use_orig_params=True)
        optimizer = kind(model.parameters())
        step(model, optimizer, made_up_gradients(matrices(4), 0))
        found = optimizer_state_dict(model, optimizer)
        again = kind(model.parameters())
        loaded = load_optimizer_state(model, again, found)
        own = optimizer.state_dict()["state"]
        assert loaded["state"].keys() == own.keys() == {0, 1, 2}
        for number, values in own.items():
            for name, value in values.items():
                assert_same_tensor(loaded["state"][number][name], value, name)

    same_on_all(1, rank)


NO_ELEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
}


@each_row("rank0_only", [False, True])
@each_row("kind", NO_ELEMENTS)
def test_a_tensor_that_cannot_be_copied(kind: str, rank0_only: bool, use_orig_params: bool) -> None:
    """A sparse, meta or quantized moment of the right shape is refused by name, and says what it is."""
    state = saved(layers(5), adam)
    state["state"]["1.weight"]["exp_avg"] = NO_ELEMENTS[kind](torch.ones(3, 5))
    for message in refusals(lambda: layers(5), adam, state, use_orig_params, rank0_only=rank0_only):
        assert "'exp_avg' of '1.weight'" in message
        assert kind in message


@each_row("kind", NO_ELEMENTS)
def test_a_parameter_that_cannot_be_copied_on_one_rank(kind: str, use_orig_params: bool) -> None:
    """If rank 1 alone has a sparse, meta or quantized parameter, both ranks name it, and neither changes anything."""

    def rank(ranks: Collectives) -> str:
        model = shard(layers(5), ranks, ("0", "1"), use_orig_params=use_orig_params)
        before = model_state_dict(model)
        state = layers(5).state_dict()
        if ranks.rank == 1:
            state["1.weight"] = NO_ELEMENTS[kind](torch.ones(3, 5))
        with pytest.raises(RuntimeError) as caught:
            load_model_state(model, state)
        after = model_state_dict(model)
        for name, value in before.items():
            assert_same_tensor(after[name], value, name)
        return str(caught.value)

    for message in same_on_all(2, rank):
        assert "'1.weight'" in message
        assert kind in message
