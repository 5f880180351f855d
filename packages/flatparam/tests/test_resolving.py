"""The arguments reach the runtime: what a strategy keeps, and when each prefetch gathers."""

from typing import Any

import torch
from each_row import each_row
from torch import nn

from flatparam import BackwardPrefetch, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_runtime import EventLog, observe

from .models import mlp, seeded
from .worlds import on_ranks

LINEAR = ModuleWrapPolicy({nn.Linear})


def unsharded(model: FSDP) -> list[bool]:
    """For each unit with parameters, whether its full parameters are in memory."""
    return [handle.is_unsharded for m in FSDP.fsdp_modules(model) for handle in m._unit.handles]


@each_row(
    ("strategy", "between"),
    [
        (None, [False] * 3),
        (ShardingStrategy.FULL_SHARD, [False] * 3),
        (ShardingStrategy.SHARD_GRAD_OP, [True] * 3),
    ],
    ids=str,
)
def test_what_a_strategy_keeps(strategy: Any, between: list[bool]) -> None:
    """S-030, S-031: FULL_SHARD frees full parameters after the forward, SHARD_GRAD_OP after the backward."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), sharding_strategy=strategy, auto_wrap_policy=LINEAR)
        loss = model(torch.ones(2, 3)).sum()
        inside = unsharded(model)
        loss.backward()
        after = unsharded(model)
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        return inside, after, unsharded(model)

    for inside, after, unsynced in on_ranks(2, rank):
        assert inside == between
        assert after == [False] * 3
        assert unsynced == between


def schedule(**arguments: Any) -> list[str]:
    """What the units of three layers do in the second of two steps, the same on each rank."""

    def rank(ranks: Collectives) -> list[str]:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, **arguments)
        model(torch.ones(2, 3)).sum().backward()
        log = EventLog()
        with observe(model, log):
            model(torch.ones(2, 3)).sum().backward()
        return [line for line in log.lines() if "unshard" in line or "use" in line or "reshard" in line]

    first, second = on_ranks(2, rank)
    assert first == second
    return first


FORWARD = [f"{kind} {unit}" for unit in (0, 2, 4) for kind in ("unshard", "use", "reshard")][:-1]
"""Unit 4 ends last, as in the step before: it is not freed, since its backward comes first."""


def test_no_prefetch() -> None:
    """With neither prefetch each unit is gathered when it is needed, and the last is still there for its backward."""
    backward = [f"{kind} {unit}" for unit in (4, 2, 0) for kind in ("unshard", "use", "reshard")][2:]
    assert schedule(backward_prefetch=None) == FORWARD + backward


def test_forward_prefetch() -> None:
    """S-021: from the second step on the next unit is gathered before this one is waited for."""
    found = schedule(backward_prefetch=None, forward_prefetch=True)[: len(FORWARD)]
    assert sorted(found) == sorted(FORWARD)
    assert [found.index(f"unshard {later}") < found.index(f"use {unit}") for unit, later in ((0, 2), (2, 4))] == [
        True,
        True,
    ]
    assert found.index("unshard 4") > found.index("reshard 0"), "one unit ahead, not two"


def test_backward_prefetch_before_computation() -> None:
    """S-015: BACKWARD_PRE, the default, gathers the next unit before this one is used."""
    found = schedule(backward_prefetch=BackwardPrefetch.BACKWARD_PRE)[len(FORWARD) :]
    assert found == schedule()[len(FORWARD) :]
    assert found.index("unshard 2") < found.index("reshard 4"), "unit 4 was kept, so that its use is no event"
    assert found.index("unshard 0") < found.index("use 2")


def test_backward_prefetch_after_computation() -> None:
    """S-015: BACKWARD_POST gathers the next unit when this one is freed."""
    found = schedule(backward_prefetch=BackwardPrefetch.BACKWARD_POST)[len(FORWARD) :]
    assert found == [
        "reshard 4",
        "unshard 2",
        "use 2",
        "reshard 2",
        "unshard 0",
        "use 0",
        "reshard 0",
    ]
