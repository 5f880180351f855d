"""A collective that fails, at its start or at its end, is an exception like any other."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    Fault,
    Raise,
    RankError,
    RecordingCollectives,
    SingleCollectives,
)
from flatparam_runtime import BackwardOrder, PrefetchPlan

from .models import Stack, batch
from .wires import BreakingCollectives, Wire, WireBroke, WiredCollectives
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]
PREFETCH = {
    "no prefetch": PrefetchPlan(0, BackwardOrder.NEVER),
    "prefetch": PrefetchPlan(2, BackwardOrder.BEFORE_COMPUTE),
    "prefetch later": PrefetchPlan(1, BackwardOrder.AFTER_COMPUTE),
}
# What one step of the model does; each of them fails once. The first test says that there are so many.
CALLS = [("all_gather", 5), ("reduce_scatter", 3)]
CASES = [(op, nth) for op, count in CALLS for nth in range(count)]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def step(module: nn.Module, rank: int) -> Grads:
    zero_gradients(module)
    loss(module, rank).backward()
    check_at_rest(module)
    return full_gradients(module)


def test_the_collectives_of_one_step() -> None:
    """A step gathers the root once and each block twice, and reduces each unit; one rank alone compares nothing."""
    ledger = ByteLedger()
    module = sharded(Stack, RecordingCollectives(SingleCollectives(), ledger), units=BLOCKS)
    loss(module, 0).backward()
    assert [(op, totals.count) for op, totals in ledger.by_op().items()] == CALLS


def fails_once(collectives: Collectives, plan: PrefetchPlan, kept: list[BaseException] | None) -> Grads:
    """The gradients of a third step, after two of which one fails."""
    module = sharded(Stack, collectives, units=BLOCKS, prefetch=plan)
    failures = 0
    for _ in range(2):
        try:
            loss(module, collectives.rank).backward()
        except WireBroke as error:
            failures += 1
            if kept is None:
                # The fault holds the exception, which would hold its frames.
                error.__traceback__ = None
            else:
                kept.append(error)
    assert failures == 1
    return step(module, collectives.rank)


@pytest.mark.pairs("op", "plan")
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("plan", PREFETCH)
@pytest.mark.parametrize(("op", "nth"), CASES, ids=[f"{op} {nth}" for op, nth in CASES])
def test_a_collective_that_cannot_start(op: str, nth: int, plan: str, kept: bool) -> None:
    """Whichever collective of the first or the second step raises: the next step is as ever, all memory is given back.

    This holds even if the caller keeps the exception, and with it every frame that it went through.
    """
    expected = mean_gradients(seeded(Stack), loss, 1)
    for later in (0, dict(CALLS)[op]):
        fault = Fault(op, nth=nth + later, action=Raise(WireBroke()))
        memory: list[BaseException] | None = [] if kept else None
        (found,) = run(1, fails_once, PREFETCH[plan], memory, faults=[fault])
        check_same(found, expected)


@pytest.mark.parametrize("plan", PREFETCH)
@pytest.mark.parametrize(("op", "nth"), CASES, ids=[f"{op} {nth}" for op, nth in CASES])
def test_a_collective_that_cannot_start_on_two_ranks(op: str, nth: int, plan: str) -> None:
    """The next step is as ever, too, if the same collective raises on both ranks, which have others in flight."""
    fault = Fault(op, nth=nth + dict(CALLS)[op], action=Raise(WireBroke()))
    expected = mean_gradients(seeded(Stack), loss, 2)
    for found in run(2, fails_once, PREFETCH[plan], None, faults=[fault]):
        check_same(found, expected)


@each_row("kept", [False, True], ids=["dropped", "kept"])
@each_row("plan", PREFETCH)
@each_row(("op", "nth"), CASES, ids=[f"{op} {nth}" for op, nth in CASES])
def test_a_collective_that_does_not_end(op: str, nth: int, plan: str, kept: bool) -> None:
    """Whichever wait of a step raises, again at every call: the next step is as ever, and all memory is given back."""
    breaking = BreakingCollectives(SingleCollectives(), op)
    module = sharded(Stack, breaking, units=BLOCKS, prefetch=PREFETCH[plan])
    step(module, 0)
    memory: list[BaseException] = []
    breaking.nth = breaking.count + nth
    try:
        loss(module, 0).backward()
    except WireBroke as error:
        if kept:
            memory.append(error)
    else:
        pytest.fail("no wait failed")
    check_same(step(module, 0), mean_gradients(seeded(Stack), loss, 1))


def test_the_first_failure_is_the_one_that_is_seen() -> None:
    """A rank that fails alone is named with its own exception; the others raise because of it."""

    def steps(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, units=BLOCKS)
        step(module, collectives.rank)

    faults = [Fault("all_gather", label="blocks.1", rank=1, action=Raise(WireBroke("cable")))]
    with pytest.raises(RankError, match=r"rank 1 of 2 failed with WireBroke: cable") as caught:
        run(2, steps, faults=faults)
    assert isinstance(caught.value.__cause__, WireBroke)


class TwoFlatParameters(nn.Module):
    """Two dtypes, so two gathers for one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a * self.b


def test_all_gathers_are_waited_for_where_one_fails() -> None:
    """If one of a unit's gathers fails, the others are waited for before their memory is freed."""
    wire = Wire()
    breaking = BreakingCollectives(WiredCollectives(SingleCollectives(), wire), "all_gather")
    breaking.nth = 0
    module = sharded(TwoFlatParameters, breaking)
    with pytest.raises(WireBroke):
        module(torch.ones(3))
    assert wire.log.count(("wait", "all_gather", "(root)")) == 1, "the second, which did not fail"
    breaking.nth = None
    module(torch.ones(3)).sum().backward()
    check_at_rest(module)
