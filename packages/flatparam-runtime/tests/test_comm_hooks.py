"""The user's functions in place of a unit's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    CommHooks,
    HookStage,
    RecordingCollectives,
    SingleCollectives,
    Topology,
)
from flatparam_comm.testing import rectangle
from flatparam_runtime import no_sync, units_in

from .models import Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    check_training,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


@attrs.define
class Counting:
    """The groups that the hooks below work over, and the number of their calls."""

    where: Topology
    calls: int = 0

    def gather(self, shard: Tensor, full: Tensor) -> None:
        self.calls += 1
        self.where.shard.all_gather(full, shard).wait()

    def mean(self, full: Tensor, shard: Tensor) -> None:
        self.calls += 1
        self.where.shard.reduce_scatter(shard, full / self.where.shard.size).wait()

    def mean_of_copies(self, tensor: Tensor) -> None:
        self.calls += 1
        assert self.where.replicate is not None
        tensor /= self.where.replicate.size
        self.where.replicate.all_reduce(tensor).wait()


def call(state: Any, *tensors: Tensor) -> None:
    # The state is the function.
    state(*tensors)


def install(module: nn.Module, stage: HookStage, hook: Callable[..., Any] | None) -> None:
    for unit in units_in(module):
        unit.reducer.hooks.set(stage, hook, None if hook is None else call, in_place=stage == "all_reduce")


STAGES: dict[str, list[tuple[HookStage, str]]] = {
    "gather": [("all_gather", "gather")],
    "reduce": [("reduce", "mean")],
    "copies": [("all_reduce", "mean_of_copies")],
    "all": [("all_gather", "gather"), ("reduce", "mean"), ("all_reduce", "mean_of_copies")],
}
# Blocks are gathered twice, the root once.
CALLS = {
    "gather": 5,
    "reduce": 3,
    "copies": 3,
    "both": 6,
    "all": 11,
}


@each_row("stages", STAGES)
def test_a_hook_that_does_the_same(stages: str, use_orig_params: bool) -> None:
    """A hook at any stage is called for each unit, in place of the collective, and training is as without it."""

    def step(world: Collectives) -> tuple[Grads, Grads]:
        where = rectangle(world, 2)
        plain, module = (sharded(Stack, where, units=BLOCKS, use_orig_params=use_orig_params) for _ in range(2))
        state = Counting(where)
        for stage, method in STAGES[stages]:
            install(module, stage, getattr(state, method))
        for each in (plain, module):
            loss(each, world.rank).backward()
            check_at_rest(each)
        assert state.calls == CALLS[stages]
        return full_gradients(module), full_gradients(plain)

    for found, expected in run(4, step):
        check_same(found, expected)


@each_row("stage", ["all_gather", "reduce"])
def test_the_collective_itself_is_not_called(stage: HookStage) -> None:
    """If a stage has a hook, the unit itself sends nothing at that stage."""
    ledger = ByteLedger()
    alone = RecordingCollectives(SingleCollectives(), ledger)
    module = sharded(Stack, alone, units=BLOCKS)
    install(module, stage, lambda source, target: target.copy_(source))
    loss(module, 0).backward()
    assert set(ledger.by_op()) == {"all_gather", "reduce_scatter"} - {stage, f"{stage}_scatter"}
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def test_replaced_and_removed(ranks: int) -> None:
    """A hook can be replaced and removed between steps; it is called if gradients are reduced, not in ``no_sync``."""
    states: list[Counting] = []

    def replacing(module: nn.Module, rank: int) -> Tensor:
        for unit in units_in(module)[:1]:
            states.append(Counting(unit.plan.topology))
            install(module, "reduce", states[-1].mean)
        with no_sync(module):
            loss(module, rank).backward()
        return loss(module, rank)

    def removing(module: nn.Module, rank: int) -> Tensor:
        install(module, "reduce", None)
        return loss(module, rank)

    check_training(Stack, [replacing, replacing, removing], ranks, units=BLOCKS)
    assert [state.calls for state in states] == [3] * 2 * ranks


def test_in_place(ranks: int) -> None:
    """A hook that works in place is given one tensor; nothing is divided besides what it divides itself."""

    def step(world: Collectives) -> Grads:
        module = sharded(Stack, rectangle(world, 1), units=BLOCKS)

        def doubled(state: object, gradient: Tensor) -> None:
            assert state == "state"
            world.all_reduce(gradient).wait()
            gradient.mul_(2.0)

        for unit in units_in(module):
            unit.reducer.hooks.set("reduce", "state", doubled, in_place=True)
        loss(module, world.rank).backward()
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), lambda module, rank: 2 * ranks * loss(module, rank), ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_a_hook_that_raises(ranks: int) -> None:
    """An exception in a hook comes out of backward; without the hook the next step is right."""

    class Broken(Exception):
        pass

    def broken(*_: Tensor) -> None:
        raise Broken

    def failing(module: nn.Module, rank: int) -> Tensor:
        if units_in(module):
            install(module, "reduce", broken)
            with pytest.raises(Broken):
                loss(module, rank).backward()
            install(module, "reduce", None)
        return loss(module, rank)

    check_training(Stack, [loss, failing, loss], ranks, units=BLOCKS)


def test_what_is_no_hook_is_refused() -> None:
    """The error names a stage that does not exist, or an object that is not callable."""
    hooks = CommHooks()
    with pytest.raises(ValueError, match="expected the stage .* found 'scatter'"):
        hooks.set("scatter", None, call, in_place=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can be called, found int"):
        hooks.set("reduce", None, 3, in_place=False)  # type: ignore[arg-type]
