"""Ranks of tensor parallelism that do not do the same: every rank is told, before an optimizer steps again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatparam_comm import Collectives
from flatparam_runtime import DivergenceError
from flatparam_simdev.worlds import run_processes

from .small import inputs, mesh_of, wrapped

pytestmark = pytest.mark.processes

RANKS = 4


def steps_with_its_own_rate(model: Any, tensor: int) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1 + tensor).step()


def clips_by_itself(model: Any, tensor: int) -> None:
    model.clip_grad_norm_(1.0 if tensor else 2.0)


def drops_its_gradients(model: Any, tensor: int) -> None:
    if tensor:
        model.zero_grad()


def freezes(model: Any, tensor: int) -> None:
    model.module.norm.weight.requires_grad_(not tensor)


def agree(model: Any, tensor: int) -> None:
    del tensor
    model.clip_grad_norm_(1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def told(ranks: Collectives, shape: tuple[int, int], act: Callable[[Any, int], None]) -> str:
    mesh = mesh_of(*shape)
    model = wrapped(mesh)
    data, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
    for step in range(2):
        model(inputs(2 * step + data)).square().mean().backward()
    act(model, tensor)
    try:
        for step in range(2, 4):
            model(inputs(2 * step + data)).square().mean().backward()
    except DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (steps_with_its_own_rate, "the ranks have stepped differently"),
        (clips_by_itself, "the ranks have not done the same between passes"),
        (drops_its_gradients, "the ranks have not done the same between passes"),
        (freezes, "'norm.weight' of unit '(root)' is not trained on all ranks"),
    ],
)
def test_ranks_of_tensor_parallelism_are_compared(
    shape: tuple[int, int], act: Callable[[Any, int], None], words: str
) -> None:
    """What one rank of tensor parallelism does differently is an error on every rank, which lists all ranks."""
    for each in run_processes(RANKS, told, shape, act):
        assert words in each
        assert all(f"rank {rank}" in each for rank in range(RANKS)), each


def test_ranks_that_agree_go_on() -> None:
    """The same steps and the same clipping on all ranks raise nothing."""
    assert run_processes(RANKS, told, (2, 2), agree) == [""] * RANKS
