"""Ranks that step their optimizers differently: an error on every rank, at the end of the next pass."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flatparam_comm import Collectives, RankError, run_threads
from flatparam_runtime import DivergenceError, notice_optimizers

from .worlds import sharded


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def _train(world: Collectives, how: str, optimizer_class: type[torch.optim.Optimizer]) -> list[float]:
    notice_optimizers()
    model = sharded(_model, world, units=["0"])
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]  # each of them takes it
    losses = []
    for step in range(4):
        odd = world.rank == 1 and step == 2
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(float(loss))
        if odd and how == "left out":
            continue
        if odd and how == "another rate":
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        if odd and how == "twice":
            optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("left out", r"rank 0 was at the step of \w+\(lr=0.1.*; rank 1 was at the gather of unit"),
        ("another rate", r"rank 0 was at the step of \w+\(lr=0.1.*; rank 1 was at the step of \w+\(lr=0.2"),
        ("twice", r"rank 0 was at the gather of unit .*; rank 1 was at the step of \w+\(lr=0.1"),
    ],
)
def test_a_rank_that_steps_differently(
    how: str, told: str, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    """A step that one rank leaves out, repeats, or takes with another learning rate is named on every rank."""
    with pytest.raises(RankError) as raised:
        run_threads(2, _train, how, optimizer_class)
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert "the ranks have stepped differently" in str(error)
    assert re.search(told, str(error)), error


def test_ranks_that_step_alike() -> None:
    """The same steps on all ranks, by a schedule, are no divergence."""

    def rank(world: Collectives) -> list[float]:
        notice_optimizers()
        model = sharded(_model, world, units=["0"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(100):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            losses.append(float(loss))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    first, second = run_threads(2, rank)
    assert first == second
    assert first[-1] < first[0]
