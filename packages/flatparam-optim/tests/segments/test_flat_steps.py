"""Optimizers over the original parameters of units step what lies side by side as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from flatparam_comm import Collectives, SingleCollectives
from flatparam_optim import set_flat_steps, tensors_stepped
from flatparam_optim.segments.joined import join_adjacent
from flatparam_runtime import no_sync

from .beneath import Branches, Stack, batch, check_same, full_parameters, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]
SIDES = ["left", "right"]


def adam(module: nn.Module) -> optim.Optimizer:
    return optim.Adam(module.parameters(), lr=0.25)


def loss(module: nn.Module, rank: int, *way: str) -> Tensor:
    out: Tensor = module(batch(rank), *way).square().mean()
    return out


def stepped_plainly(make: Callable[[], nn.Module], ways: Sequence[tuple[str, ...]], ranks: int) -> dict[str, Tensor]:
    """The parameters of a local module after a step on each way."""
    local = seeded(make)
    optimizer = adam(local)
    for way in ways:
        gradients = mean_gradients(local, lambda module, rank, way=way: loss(module, rank, *way), ranks)
        for name, parameter in local.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in local.named_parameters()}


@pytest.mark.parametrize("units", [[], BLOCKS], ids=["one", "several"])
def test_one_tensor_for_each_unit(units: list[str], ranks: int) -> None:
    """One group: as many tensors as units, from the first step, and the values of the local module."""

    def rank(collectives: Collectives) -> tuple[dict[str, Tensor], list[int | None]]:
        module = sharded(Stack, collectives, units=units, use_orig_params=True)
        optimizer = adam(module)
        counts = []
        for _ in range(3):
            optimizer.zero_grad()
            loss(module, collectives.rank).backward()
            optimizer.step()
            counts.append(tensors_stepped(optimizer))
        return full_parameters(module), counts

    expected = stepped_plainly(Stack, [()] * 3, ranks)
    for parameters, counts in run(ranks, rank):
        check_same(parameters, expected)
        assert counts == [1 + len(units)] * 3


def test_branches_that_are_not_taken() -> None:
    """A parameter without a gradient keeps its values and its count of steps, also if steps with and without alternate."""
    ways = [("l",), ("lr",), ("r",), ("lr",), ("l",)]

    def rank(collectives: Collectives) -> tuple[dict[str, Tensor], list[float]]:
        module = sharded(Branches, collectives, use_orig_params=True)
        optimizer = adam(module)
        for way in ways:
            optimizer.zero_grad()
            loss(module, collectives.rank, *way).backward()
            optimizer.step()
        counts = [float(optimizer.state[p]["step"]) if p.numel() else 0 for _, p in module.named_parameters()]
        return full_parameters(module), counts

    expected = stepped_plainly(Branches, ways, 2)
    for parameters, counts in run(2, rank):
        check_same(parameters, expected)
        steps = [5.0, *[4.0] * 3, *[3.0] * 3]
        assert all(mine in (0, all_) for mine, all_ in zip(counts, steps, strict=True))
        assert any(counts)


class Tails(nn.Module):
    """Alone with an element, a pair, and two without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.pair = nn.ParameterList([torch.zeros(4)]), nn.ParameterList([torch.zeros(4)] * 2)
        self.empty = nn.ParameterList([torch.zeros(0)] * 2)


@pytest.mark.parametrize("units", [["alone", "pair"], ["pair", "alone"]])
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_one_tensor_does_not_depend_on_order(units: list[str], order: int) -> None:
    """Which parameters are one tensor does not depend on where units lie in memory; empty ones are in no segment."""
    module = sharded(Tails, SingleCollectives(), units=units, use_orig_params=True)
    for parameter in module.parameters():
        parameter.grad = parameter.detach()
    (joined,) = join_adjacent([*module.parameters()][::order], {})
    assert set(joined.parameters) == {*module.pair}


def test_flat_exposures_are_left_alone() -> None:
    """An optimizer over flat parameters steps them as it always did."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    optimizer = adam(module)
    loss(module, 0).backward()
    optimizer.step()
    assert tensors_stepped(optimizer) is None


def test_a_step_makes_gathered_parameters_stale() -> None:
    """If full parameters are kept between passes, the next forward pass sees the step."""
    module = sharded(Stack, SingleCollectives(), use_orig_params=True, free_after_forward=False)
    optimizer = adam(module)
    before = loss(module, 0)
    before.backward()
    optimizer.step()
    assert tensors_stepped(optimizer) == 1
    assert float(loss(module, 0)) != float(before)


def test_gradients_of_several_passes() -> None:
    """Passes inside `no_sync`, and a sum over passes, come to one tensor, with the numbers of separate steps."""

    def trained(flat: bool) -> tuple[dict[str, Tensor], Any]:
        module = sharded(Stack, SingleCollectives(), units=BLOCKS, use_orig_params=True)
        optimizer = adam(module)
        set_flat_steps(optimizer, flat)
        for _ in range(2):
            with no_sync(module):
                loss(module, 0).backward()
            loss(module, 1).backward()
            loss(module, 2).backward()
            optimizer.step()
        return full_parameters(module), tensors_stepped(optimizer)

    flat, count = trained(True)
    each, none = trained(False)
    check_same(flat, each)
    assert (count, none) == (3, None)


def test_memory_of_replaced_state_is_let_go() -> None:
    """State that a program moves away between steps is freed, though its runs are cached."""
    module = sharded(Stack, SingleCollectives(), use_orig_params=True)
    optimizer = adam(module)
    loss(module, 0).backward()
    optimizer.step()
    first = next(iter(optimizer.state.values()))
    watched = torch.multiprocessing.reductions.StorageWeakRef(first["exp_avg"].untyped_storage())
    del first
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    assert watched.expired()
