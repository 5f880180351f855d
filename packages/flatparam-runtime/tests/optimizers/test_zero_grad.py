"""`zero_grad()` of an optimizer drops the gradients of its parameters that wait for a reduction, too."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, optim

from flatparam_comm import Collectives, RankError, run_threads
from flatparam_comm.testing import rectangle
from flatparam_runtime import DivergenceError, drop_waiting, no_sync, unit_of, units_in

from ..models import Stack, batch
from ..worlds import Grads, check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = module(batch(rank, step)).square().mean()
    return out


@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_optimizer_of_a_part(use_orig_params: bool, set_to_none: bool) -> None:
    """The sums of parameters that the optimizer does not hold stay, and are reduced with the next micro-batch."""

    def train(world: Collectives) -> Grads:
        module = sharded(Stack, world, units=BLOCKS, use_orig_params=use_orig_params)
        optimizer = optim.SGD(module.get_submodule("blocks").parameters(), lr=1.0)
        with no_sync(module):
            loss(module, world.rank, 0).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        block = unit_of(module.get_submodule("blocks.0"))
        assert block is not None
        assert not any(handle.gradients.buffer.is_allocated for handle in block.handles)
        loss(module, world.rank, 1).backward()
        check_at_rest(module)
        return full_gradients(module)

    first, second = (mean_gradients(seeded(Stack), lambda m, r, s=s: loss(m, r, s), 2) for s in range(2))
    expected: Grads = {}
    for name, part in second.items():
        before = first[name]
        assert part is not None
        assert before is not None
        expected[name] = part if name.startswith("blocks") else before + part
    for found in run(2, train):
        # Micro-batches are added before ranks.
        check_same(found, expected, exact=False)


def test_what_waits_for_the_copies() -> None:
    """Shards that were summed inside their group only are dropped as well."""

    def train(world: Collectives) -> Grads:
        module = sharded(Stack, rectangle(world, 2), units=BLOCKS, use_orig_params=True)
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        for unit in units_in(module):
            unit.reducer.sums_copies = False
        loss(module, world.rank, 0).backward()
        optimizer.zero_grad()
        for unit in units_in(module):
            unit.reducer.sums_copies = True
        loss(module, world.rank, 1).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), lambda m, r: loss(m, r, 1), 4)
    for found in run(4, train):
        check_same(found, expected, exact=False)


def test_dropping_is_for_chosen_units() -> None:
    """`drop_waiting` drops what waits in the units that it is given; where nothing waits, it does nothing."""

    def train(world: Collectives) -> tuple[Grads, Grads]:
        module = sharded(Stack, world, units=BLOCKS)
        with no_sync(module):
            loss(module, world.rank, 0).backward()
        drop_waiting(units_in(module))
        loss(module, world.rank, 1).backward()
        once = full_gradients(module)
        drop_waiting(units_in(module))
        return once, full_gradients(module)

    expected = mean_gradients(seeded(Stack), lambda m, r: loss(m, r, 1), 2)
    for found, same in run(2, train):
        check_same(found, expected)
        check_same(same, expected)


def test_ranks_that_do_not_all_drop() -> None:
    """If one rank drops what another keeps, the gradients would be a mixture: every rank is told."""

    def train(world: Collectives) -> None:
        module = sharded(Stack, world, units=BLOCKS)
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        # An accelerator tells of step 2 in step 3.
        for step in range(4):
            with no_sync(module):
                loss(module, world.rank, step).backward()
            if step != 2 or world.rank == 0:
                optimizer.zero_grad()
            loss(module, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankError) as raised:
        run_threads(2, train)
    assert isinstance(raised.value.__cause__, DivergenceError)
    assert "the zero_grad() in unit '(root)', of stem.weight" in str(raised.value)
