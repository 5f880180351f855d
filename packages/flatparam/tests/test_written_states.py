"""Writes in place to the tensors of a state, by programs that keep an average over `state_dict()`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.optim.swa_utils import AveragedModel

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, fully_shard
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

from .worlds import on_ranks

TOLD = "written in place to 2 tensors of an earlier state_dict"


class Normed(nn.Module):
    """A layer with buffers, which are the model's own in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def flat(ranks: Collectives) -> nn.Module:
    return FSDP(Normed(), ranks)


def originals(ranks: Collectives) -> nn.Module:
    return FSDP(Normed(), ranks, use_orig_params=True)


def kept(ranks: Collectives) -> nn.Module:
    return FSDP(Normed(), ranks, ShardingStrategy.NO_SHARD, use_orig_params=True)


def in_place(ranks: Collectives) -> nn.Module:
    return fully_shard(Normed(), mesh=ranks)


def stepped(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.eye(3)).square().sum().backward()
    optimizer.step()


def averaged_by_state(average: nn.Module, model: nn.Module) -> None:
    """As timm's ModelEmaV3."""
    with torch.no_grad():
        for mine, other in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(other, 0.5)


def averaged_by_parameters(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.5)


def told(action: Callable[[], object]) -> list[str]:
    """The warnings about writes."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in found if "written in place" in str(each.message)]


@each_row("wrap", [flat, originals, kept, in_place])
def test_an_average_over_states_is_told(wrap: Callable[[Collectives], nn.Module]) -> None:
    """An average that updates what `state_dict()` returns is told at the next state that it does not move, once.

    One that updates parameters, or loads its state, is told nothing, and moves.
    """

    def rank(ranks: Collectives) -> None:
        model = wrap(ranks)
        for update, moves in ((averaged_by_state, False), (averaged_by_parameters, True)):
            average = copy.deepcopy(model)
            before = {name: value.clone() for name, value in average.state_dict().items()}
            stepped(model)
            update(average, model)
            messages = told(average.state_dict)
            assert [TOLD in message for message in messages] == ([] if moves else [True]), messages
            assert told(average.state_dict) == []
            same = torch.equal(average.state_dict()["linear.weight"], before["linear.weight"])
            assert same is not moves
            assert told(model.state_dict) == []

    on_ranks(2, rank)


def test_states_that_are_loaded_are_not_told() -> None:
    """What is written and loaded, or held in a buffer, or only read, is no loss."""

    def rank(ranks: Collectives) -> None:
        model = originals(ranks)
        state = model.state_dict()
        stepped(model)
        state["norm.running_mean"].add_(1)
        assert told(model.state_dict) == []
        state["linear.weight"].zero_()
        model.load_state_dict(state)
        assert told(model.state_dict) == []
        assert not model.state_dict()["linear.weight"].any()
        # The state is still there.
        state["linear.bias"].zero_()
        assert told(model.state_dict) == []

    on_ranks(2, rank)


def test_torchs_average_moves() -> None:
    """`AveragedModel` around a sharded model moves with it, and nothing is told."""

    def rank(ranks: Collectives) -> None:
        for wrap in (flat, originals, in_place):
            model = wrap(ranks)
            average = AveragedModel(model, use_buffers=True)
            before = average.module.state_dict()["linear.weight"].clone()
            for _ in range(2):
                stepped(model)
                average.update_parameters(model)
            assert told(average.module.state_dict) == []
            assert not torch.equal(average.module.state_dict()["linear.weight"], before)

    on_ranks(2, rank)


def in_processes(ranks: Collectives) -> Any:
    model = fully_shard(Normed(), mesh=ranks)
    average = copy.deepcopy(model)
    stepped(model)
    averaged_by_state(average, model)
    return [TOLD in message for message in told(average.state_dict)]


@pytest.mark.processes
def test_dtensors_are_told() -> None:
    """So is an average over the `DTensor`s of a module that is sharded in place."""
    assert run_processes(2, in_processes) == [[True], [True]]
