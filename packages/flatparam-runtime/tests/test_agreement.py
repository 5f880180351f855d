"""If ranks have different models or diverge, every rank raises an error before it trains anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    Precision,
    RecordingCollectives,
    SingleCollectives,
    Topology,
)
from flatparam_comm.testing import rectangle
from flatparam_runtime import DivergenceError, UnitPlan, shard_module, units_in

from .models import WIDTH, Branches, Chain, batch
from .worlds import run, seeded, sharded

SIDES = ["left", "right"]


def refused(fn: Callable[[], object]) -> str:
    """The message of the error of one pass; on an accelerator it may come one pass later."""
    passes = 1 if torch.get_default_device().type == "cpu" else 3
    with pytest.raises(DivergenceError) as caught:
        for _ in range(passes):
            fn()
    return str(caught.value)


def loss(module: nn.Module, rank: int, *more: object) -> Tensor:
    out: Tensor = module(batch(rank), *more).square().mean()
    return out


def test_copies_of_different_shards_are_refused() -> None:
    """Groups that cross, so that the ranks of a replicate group hold different shards, would add up what does not belong."""

    def rank(world: Collectives) -> str:
        rows = [world.subgroup(ranks) for ranks in ([0, 1], [2, 3])]
        crossed = [world.subgroup(ranks) for ranks in ([0, 3], [1, 2])]
        shard, replicate = (next(group for group in groups if group is not None) for groups in (rows, crossed))
        module = seeded(lambda: Chain(1))
        shard_module(module, UnitPlan(Topology(shard, replicate)))
        return refused(lambda: loss(module, world.rank))

    for message in run(4, rank):
        assert "the ranks of a replicate group hold different shards: rank 0 has shard" in message


# The same units


def wider() -> Chain:
    chain = Chain(2)
    chain.blocks[1].down = nn.Linear(WIDTH, WIDTH, bias=True)
    return chain


def renamed() -> Chain:
    chain = Chain(2)
    chain.blocks[1].other = chain.blocks[1].down
    del chain.blocks[1].down
    return chain


OTHER_MODELS: dict[str, tuple[Callable[[], Chain], dict[str, Any], str]] = {
    "one more unit": (lambda: Chain(3), {}, "unit 'blocks.2': 1 flat parameters"),
    "another parameter": (wider, {}, "parameter 'down.bias' of unit 'blocks.1'"),
    "another name": (renamed, {}, "parameter 'other.weight' of unit 'blocks.1'"),
    "another dtype": (lambda: Chain(2).double(), {}, r"torch.float64"),
    "another strategy": (lambda: Chain(2), {"free_after_forward": False}, "the sharding strategy of unit"),
    "another precision": (
        lambda: Chain(2),
        {"precision": Precision(torch.bfloat16)},
        "the mixed precision of unit",
    ),
    "another exposure": (lambda: Chain(2), {"use_orig_params": True}, "use_orig_params of unit"),
}


@each_row("kind", OTHER_MODELS)
def test_different_models(kind: str) -> None:
    """Before the first byte is gathered, every rank names the first difference between the models."""
    make, plan, told = OTHER_MODELS[kind]

    def attempt(collectives: Collectives) -> tuple[str, int]:
        ledger = ByteLedger()
        recorded = RecordingCollectives(collectives, ledger)
        mine, more = (make, plan) if collectives.rank else (lambda: Chain(2), {})
        units = [f"blocks.{i}" for i in range(len(seeded(mine).blocks))]
        module = sharded(mine, recorded, units=units, **more)
        return refused(lambda: module(batch())), ledger.total.count

    for rank, (message, transfers) in enumerate(run(2, attempt)):
        assert message.startswith(f"rank {rank}: the ranks have different models: rank 0 has ")
        assert told in message.partition("rank 1 has ")[2]
        assert transfers == 0


# The same order of units


@each_row("steps", [0, 1, 3])
@each_row("ways", [("lr", "rl"), ("ll", "rr")], ids="-".join)
def test_units_of_one_size_in_another_order(ways: tuple[str, str], steps: int, use_orig_params: bool) -> None:
    """After any number of steps the pass raises on every rank, before an optimizer could step, and names both units."""

    def attempt(collectives: Collectives) -> tuple[str, bool, int]:
        module = sharded(Branches, collectives, units=SIDES, use_orig_params=use_orig_params)
        for _ in range(steps):
            loss(module, collectives.rank, "lr").backward()
            module.zero_grad()
        message = refused(lambda: loss(module, collectives.rank, ways[collectives.rank]).backward())
        untrained = all(parameter.grad is None for parameter in module.parameters())
        return message, untrained, units_in(module)[1].unsharded_nbytes

    names = "up.weight, down.weight" if use_orig_params else "up.weight, up.bias"
    for rank, (message, untrained, nbytes) in enumerate(run(2, attempt)):
        assert nbytes >= 144
        assert message.startswith(f"rank {rank}: the ranks run different units: ")
        assert f"unit 'left' ({names}, ...; {nbytes} bytes)" in message
        assert f"unit 'right' ({names}, ...; {nbytes} bytes)" in message
        assert "rank 0 was at" in message
        assert "rank 1 was at" in message
        # In the first pass not even a gather goes to the wrong unit.
        assert untrained or steps


def test_a_rank_that_leaves_a_unit_out() -> None:
    """In the first pass a unit that one rank does not call is an error of both, and not a hang."""

    def attempt(collectives: Collectives) -> str:
        module = sharded(Branches, collectives, units=SIDES)
        return refused(lambda: loss(module, collectives.rank, "lr" if collectives.rank else "l").backward())

    for message in run(2, attempt):
        assert "rank 1 was at the gather of unit 'right'" in message


@each_row("steps", [0, 2])
def test_evaluation_in_another_order(steps: int) -> None:
    """A forward pass without gradients whose order differs raises on every rank, before its output is used."""

    def attempt(collectives: Collectives) -> str:
        module = sharded(Branches, collectives, units=SIDES)
        for _ in range(steps):
            loss(module, collectives.rank).backward()
        with torch.no_grad():
            return refused(lambda: module(batch(), "rl" if collectives.rank else "lr"))

    assert all("unit 'left'" in message and "unit 'right'" in message for message in run(2, attempt))


@each_row("steps", [0, 2])
def test_one_rank_of_four(steps: int) -> None:
    """All ranks detect that one rank diverges, even those that share no group with it."""

    def attempt(world: Collectives) -> str:
        module = sharded(Branches, rectangle(world, 2), units=SIDES)
        for _ in range(steps):
            loss(module, world.rank).backward()
        return refused(lambda: loss(module, world.rank, "rl" if world.rank == 3 else "lr").backward())

    for rank, message in enumerate(run(4, attempt)):
        assert message.startswith(f"rank {rank}: ")
        # An accelerator may be at a unit that is gathered ahead.
        ahead = torch.get_default_device().type != "cpu"
        assert f"rank 3 was at the gather of unit {'' if ahead else repr('right')}" in message


def test_parameters_that_one_rank_freezes_for_a_moment() -> None:
    """A rank that freezes a parameter and trains it again, alone, is told apart by these changes."""

    def part(collectives: Collectives) -> str:
        module = sharded(Branches, collectives, units=SIDES, use_orig_params=True)
        loss(module, collectives.rank).backward()
        if collectives.rank == 1:
            module(batch(1))
            for wanted in (False, True):
                module.left.up.weight.requires_grad_(wanted)
                module(batch(1))
        else:
            for _ in range(3):
                module(batch(0))
        return refused(lambda: loss(module, collectives.rank).backward())

    for text in run(2, part):
        assert "rank 1 was at the change of requires_grad in unit 'left' (up.weight, " in text


def test_a_backward_pass_inside_the_forward_pass() -> None:
    """A module that differentiates through its own parameters before its forward call is over is refused by its name."""

    class Impatient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(self.layer(x))
            out.sum().backward()
            return out

    module = sharded(Impatient, SingleCollectives(), units=["inner"])
    with pytest.raises(RuntimeError, match="while its forward call was still running"):
        module(batch())
