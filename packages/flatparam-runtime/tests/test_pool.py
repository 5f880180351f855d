"""The memory that a tree of units keeps during a pass: between passes it is none, however the pass ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import BufferPool, Collectives, SingleCollectives
from flatparam_runtime import no_sync, summon_full_params, units_in

from .models import WIDTH, Block, Chain, batch
from .worlds import check_at_rest, run, sharded

BLOCKS = [f"blocks.{number}" for number in range(3)]
BLOCK_NBYTES = 36 * 4


class Failing(Chain):
    """A chain that raises before its last block, in forward or in backward."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2 and self.way == "forward":
                raise ValueError("on purpose")
            x = block(x)
            if number == 0 and self.way == "backward":
                x.register_hook(_fail)
        return x


def _fail(gradient: Tensor) -> Tensor:
    raise ValueError("on purpose")


def pool_of(module: nn.Module) -> BufferPool:
    """The pool of all units of the tree."""
    pools = {handle.forms.pool for unit in units_in(module) for handle in unit.handles}
    (pool,) = pools
    assert pool is not None
    return pool


def step(module: nn.Module) -> None:
    module(batch()).sum().backward()


def evaluate(module: nn.Module) -> None:
    with torch.no_grad():
        module(batch())


def step_in_inference(module: nn.Module) -> None:
    with torch.inference_mode():
        module(batch())


@each_row("way", [step, evaluate, step_in_inference])
def test_nothing_is_kept_between_passes(way: Callable[[nn.Module], None], ranks: int, free_after_forward: bool) -> None:
    """After a step and after an evaluation no byte is in use and none is kept."""

    def rank(collectives: Collectives) -> list[tuple[int, int]]:
        module = sharded(Chain, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        found = []
        for _ in range(3):
            way(module)
            found.append((pool_of(module).in_use, pool_of(module).kept))
        check_at_rest(module)
        return found

    for found in run(ranks, rank):
        assert found == [(0, 0)] * 3


@pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason="this torch cannot hand memory from storage to storage",
)
def test_what_is_kept_within_a_pass() -> None:
    """Between forward and backward one unit's memory is kept: units of the same size take turns with it."""

    def rank(collectives: Collectives) -> None:
        module = sharded(Chain, collectives, units=BLOCKS)
        total = module(batch()).sum()
        pool = pool_of(module)
        assert (pool.in_use, pool.kept, pool.peak, pool.hits) == (0, BLOCK_NBYTES, BLOCK_NBYTES, 2)
        total.backward()
        assert (pool.in_use, pool.kept, pool.peak_of_pass) == (0, 0, 3 * BLOCK_NBYTES)

    run(2, rank)


def test_where_nothing_is_gathered_again_a_backward_pass_keeps_nothing() -> None:
    """While a block computes, only unsharded blocks use memory: each one's gradients take that of its parameters."""
    how = {"free_after_forward": False, "overlaps_reductions": False}

    def rank(collectives: Collectives) -> None:
        module = sharded(Chain, collectives, units=BLOCKS, **how)
        found = []

        def look(up: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(lambda _: found.append((pool_of(module).in_use, pool_of(module).kept)))

        for block in module.blocks:
            block.up.register_forward_hook(look)
        step(module)
        assert found == [(3 * BLOCK_NBYTES, 0), (2 * BLOCK_NBYTES, 0), (BLOCK_NBYTES, 0)]
        assert pool_of(module).peak_of_pass == 3 * BLOCK_NBYTES

    run(2, rank)


def test_what_is_not_sharded_takes_no_memory() -> None:
    """One rank's full parameters are its flat parameters, and its flat gradients become `.grad`."""
    module = sharded(Chain, SingleCollectives(), units=BLOCKS, use_orig_params=True)
    for _ in range(2):
        total = module(batch()).sum()
        pool = pool_of(module)
        assert (pool.in_use, pool.kept, pool.peak) == (0, 0, 0)
        total.backward()
        assert (pool.in_use, pool.kept, pool.peak_of_pass) == (0, 0, BLOCK_NBYTES)
    check_at_rest(module)


def test_memory_is_kept_in_passes_only() -> None:
    """The pool keeps what is freed from the beginning of a pass to its end, and nothing outside of one."""
    module = sharded(Chain, SingleCollectives(), units=BLOCKS)
    step(module)
    pool = pool_of(module)
    found = [pool.keeps]
    total = module(batch()).sum()
    found.append(pool.keeps)
    total.backward()
    found.append(pool.keeps)
    evaluate(module)
    found.append(pool.keeps)
    with summon_full_params(module):
        found.append(pool.keeps)
    assert found == [False, True, False, False, False]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_nothing_is_kept_after_an_exception(way: str, ranks: int) -> None:
    """Once an exception has left a forward call, or the next pass begins after one in backward, nothing is kept."""

    def rank(collectives: Collectives) -> list[tuple[int, int]]:
        module = sharded(Failing, collectives, units=BLOCKS)
        step(module)
        module.way = way
        with contextlib.suppress(ValueError):
            step(module)
        module.way = ""
        if way == "backward":
            # The next pass drops the interrupted one.
            evaluate(module)
        found = [(pool_of(module).in_use, pool_of(module).kept)]
        step(module)
        check_at_rest(module)
        return [*found, (pool_of(module).in_use, pool_of(module).kept)]

    for found in run(ranks, rank):
        assert found == [(0, 0)] * 2


def test_what_no_sync_holds(free_after_forward: bool) -> None:
    """Inside no_sync the gradients are in use between passes, and what the plan does not free; nothing is kept."""
    module = sharded(Chain, SingleCollectives(), units=BLOCKS, free_after_forward=free_after_forward)
    unit = units_in(module)[1]
    held = 3 * BLOCK_NBYTES * (1 if unit.plan.free_after_unsynced_backward else 2)
    with no_sync(module):
        for _ in range(2):
            step(module)
            assert (pool_of(module).in_use, pool_of(module).kept) == (held, 0)
    step(module)
    assert (pool_of(module).in_use, pool_of(module).kept) == (0, 0)


def test_nothing_is_kept_after_summoning() -> None:
    """Full parameters that are summoned between passes leave no memory behind."""
    module = sharded(Chain, SingleCollectives(), units=BLOCKS)
    step(module)
    with summon_full_params(module):
        assert pool_of(module).in_use == 3 * BLOCK_NBYTES
    assert (pool_of(module).in_use, pool_of(module).kept) == (0, 0)


def test_each_tree_has_one_pool() -> None:
    """Units that grow into a larger tree take their memory from its pool, and none of their own."""
    module = nn.Sequential(sharded(Block, SingleCollectives()), nn.Linear(WIDTH, WIDTH))
    step(module[0])
    before = pool_of(module[0])
    whole = sharded(lambda: module, SingleCollectives())
    step(whole)
    assert pool_of(whole) is not before
    assert (before.in_use, before.kept) == (0, 0)
