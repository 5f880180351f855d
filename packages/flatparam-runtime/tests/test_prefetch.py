"""Transfers begin before they are needed and are waited for late; results are the same with any order."""

from __future__ import annotations

from typing import Any

import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import BackwardOrder, EventLog, PrefetchPlan, observe

from .models import WIDTH, Branches, batch
from .wires import Wire, WiredCollectives
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

DEPTH = 4
BLOCKS = [f"blocks.{i}" for i in range(DEPTH)]


class Mark(torch.autograd.Function):
    """The identity, which enters a computation on the wire in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Any) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.note()
        return gradients[0], None


class Noted(nn.Module):
    """A linear layer that enters its computations on a wire."""

    def __init__(self, name: str, wire: Wire, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.name, self.wire, self.seconds = name, wire, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.wire.compute(f"forward {self.name}", self.seconds)
        out: Tensor = Mark.apply(self.layer(x), lambda: self.wire.compute(f"backward {self.name}", 2 * self.seconds))  # type: ignore[no-untyped-call]
        return out


class Track(nn.Module):
    """Noted layers, and no parameters of its own."""

    def __init__(self, wire: Wire, seconds: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noted(f"blocks.{i}", wire, seconds) for i in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def track(plan: PrefetchPlan, wire: Wire, **more: Any) -> Track:
    return sharded(
        lambda: Track(wire), WiredCollectives(SingleCollectives(), wire), units=BLOCKS, prefetch=plan, **more
    )


def place(lines: list[str], what: str) -> int:
    assert what in lines, (what, lines)
    return lines.index(what)


@each_row("depth", [0, 1, 2])
def test_forward_prefetch(depth: int) -> None:
    """From the second pass on a unit's gather begins ``depth`` units before it computes, and not sooner."""
    wire = Wire()
    module = track(PrefetchPlan(depth), wire)
    with torch.no_grad():
        module(batch())
        wire.log.clear()
        module(batch())
    lines = wire.lines()
    for number, name in enumerate(BLOCKS):
        begin = place(lines, f"begin all_gather {name}")
        assert begin < place(lines, f"wait all_gather {name}") < place(lines, f"compute forward {name}")
        first = max(number - depth, 0)
        assert begin < place(lines, f"compute forward blocks.{first}")
        if first > 0:
            assert begin > place(lines, f"compute forward blocks.{first - 1}")


def backward_lines(order: BackwardOrder, **more: Any) -> list[str]:
    wire = Wire()
    module = track(PrefetchPlan(0, order), wire, **more)
    module(batch()).sum().backward()
    wire.log.clear()
    output = module(batch())
    wire.log.clear()
    output.sum().backward()
    check_at_rest(module)
    return wire.lines()


def test_backward_prefetch_before_compute() -> None:
    """BEFORE_COMPUTE: the gather for the next unit begins before this unit's gradients are computed."""
    lines = backward_lines(BackwardOrder.BEFORE_COMPUTE)
    for number in reversed(range(1, DEPTH)):
        begin = place(lines, f"begin all_gather blocks.{number - 1}")
        assert begin < place(lines, f"compute backward blocks.{number}")
        assert place(lines, f"wait all_gather blocks.{number - 1}") > place(lines, f"compute backward blocks.{number}")
        if number < DEPTH - 1:
            assert begin > place(lines, f"compute backward blocks.{number + 1}"), "one unit ahead, not two"


def test_backward_prefetch_after_compute() -> None:
    """AFTER_COMPUTE: it begins when this unit's gradients are there, its parameters freed, before their reduction."""
    lines = backward_lines(BackwardOrder.AFTER_COMPUTE)
    for number in reversed(range(1, DEPTH)):
        begin = place(lines, f"begin all_gather blocks.{number - 1}")
        assert begin > place(lines, f"compute backward blocks.{number}")
        assert begin < place(lines, f"begin reduce_scatter blocks.{number}")
        assert begin < place(lines, f"compute backward blocks.{number - 1}")


def test_backward_prefetch_frees_before_it_gathers() -> None:
    """AFTER_COMPUTE never holds the full parameters of two units at once in backward."""
    wire = Wire()
    module = track(PrefetchPlan(0, BackwardOrder.AFTER_COMPUTE), wire)
    output = module(batch())
    log = EventLog()
    with observe(module, log):
        output.sum().backward()
    held = 0
    for event in log.events:
        held += {"unshard": 1, "reshard": -1}.get(event.kind, 0)
        assert held <= 1, log.lines()


def test_no_backward_prefetch() -> None:
    """NEVER: each gather begins after the computation before it, and is waited for at once."""
    lines = backward_lines(BackwardOrder.NEVER)
    for number in reversed(range(DEPTH)):
        begin = place(lines, f"begin all_gather blocks.{number}")
        assert lines[begin + 1] == f"wait all_gather blocks.{number}"
        if number < DEPTH - 1:
            assert begin > place(lines, f"compute backward blocks.{number + 1}")


@each_row("order", BackwardOrder)
def test_reductions_are_waited_for_one_unit_later(order: BackwardOrder) -> None:
    """A unit's reduction is launched and left; the wait comes after the next unit's gradients are computed."""
    lines = backward_lines(order)
    for number in reversed(range(1, DEPTH)):
        begin = place(lines, f"begin reduce_scatter blocks.{number}")
        wait = place(lines, f"wait reduce_scatter blocks.{number}")
        assert begin < place(lines, f"compute backward blocks.{number - 1}") < wait
        assert wait < place(lines, f"begin reduce_scatter blocks.{number - 1}"), "two gradient buffers at most"


def step_seconds(plan: PrefetchPlan, transfer: float) -> tuple[float, float]:
    """The (virtual) seconds of the forward and of the backward of a second step."""
    wire = Wire(seconds=transfer)
    module = track(plan, wire)
    module(batch()).sum().backward()
    start = wire.clock = wire.free_at = max(wire.clock, wire.free_at)
    output = module(batch())
    middle = wire.clock
    output.sum().backward()
    return middle - start, wire.clock - middle


def test_forward_prefetch_hides_transfers() -> None:
    """With computations as long as transfers, a forward of n units takes n + 1 with prefetching, 2 n without."""
    without, _ = step_seconds(PrefetchPlan(0), 1.0)
    ahead, _ = step_seconds(PrefetchPlan(1), 1.0)
    assert without == 2 * DEPTH
    assert ahead == DEPTH + 1


def test_backward_prefetch_hides_transfers() -> None:
    """With gathers and reductions that fit into the computations, only the first gather and the last reduction show.

    Computing gradients takes 2 s, a transfer 0.5 s.
    """
    _, never = step_seconds(PrefetchPlan(0, BackwardOrder.NEVER), 0.5)
    _, before = step_seconds(PrefetchPlan(0, BackwardOrder.BEFORE_COMPUTE), 0.5)
    assert before == 0.5 + 2 * DEPTH + 0.5
    assert never > before + (DEPTH - 1) * 0.5 - 1e-9


WAYS = ["lr", "rl", "l", "r", "lrlr", "", "rrl", "lr"]
PLANS = [PrefetchPlan(depth, order) for depth in (0, 1, 3) for order in BackwardOrder]


@each_row("plan", PLANS, ids=[f"{plan.forward}-{plan.backward.name}" for plan in PLANS])
def test_a_wrong_guess_changes_nothing(plan: PrefetchPlan, ranks: int, free_after_forward: bool) -> None:
    """An order that changes at every step, with branches not taken and units called twice, gives the same gradients.

    What was prefetched in vain is freed at the end of the pass.
    """

    def loss(module: nn.Module, rank: int, way: str) -> Tensor:
        out: Tensor = module(batch(rank), way).square().mean()
        return out

    def steps(collectives: Collectives) -> list[Grads]:
        module = sharded(
            Branches,
            collectives,
            units=["left", "right"],
            prefetch=plan,
            free_after_forward=free_after_forward,
        )
        found = []
        for way in WAYS:
            zero_gradients(module)
            loss(module, collectives.rank, way).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
        return found

    local = seeded(Branches)
    expected = [mean_gradients(local, lambda m, r, w=way: loss(m, r, w), ranks) for way in WAYS]
    for found in run(ranks, steps):
        for each, wanted in zip(found, expected, strict=True):
            check_same(each, wanted)


def test_what_was_gathered_in_vain_is_freed() -> None:
    """A unit that was prefetched in forward and not used is freed when the pass ends, before any backward."""
    module = sharded(Branches, SingleCollectives(), units=["left", "right"], prefetch=PrefetchPlan(1))
    module(batch(), "lr").sum().backward()
    log = EventLog()
    with observe(module, log):
        output = module(batch(), "l")
    assert [line for line in log.lines() if "right" in line] == ["unshard right", "reshard right"]
    output.sum().backward()
    check_at_rest(module)


class Aside(nn.Module):
    """Two layers, of which the first has no part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        out: Tensor = self.used(x)
        return out


@each_row("order", BackwardOrder)
def test_the_end_of_backward_gathers_nothing(order: BackwardOrder) -> None:
    """Units that become complete when autograd has ended gather no unit ahead, which would stay in memory."""
    module = sharded(Aside, SingleCollectives(), units=["unused", "used"], prefetch=PrefetchPlan(0, order))
    for _ in range(2):
        module(batch()).sum().backward()
        check_at_rest(module)


def test_prefetching_on_two_ranks_overlaps(device: torch.device) -> None:
    """On two ranks, on CPU as on a GPU, the next unit's gather is under way while this unit computes."""

    def steps(collectives: Collectives) -> list[str]:
        wire = Wire()
        module = sharded(
            lambda: Track(wire),
            WiredCollectives(collectives, wire),
            units=BLOCKS,
            prefetch=PrefetchPlan(1),
            device=device,
        )
        for _ in range(2):
            wire.log.clear()
            module(batch(collectives.rank, near=module)).sum().backward()
        check_at_rest(module)
        return wire.lines()

    for lines in run(2, steps):
        forward = lines[: place(lines, f"compute backward blocks.{DEPTH - 1}")]
        backward = lines[len(forward) :]
        assert place(forward, "begin all_gather blocks.2") < place(forward, "compute forward blocks.1")
        assert place(forward, "wait all_gather blocks.2") > place(forward, "compute forward blocks.1")
        assert place(backward, "begin all_gather blocks.0") < place(backward, "compute backward blocks.1")
        assert place(backward, "wait all_gather blocks.0") > place(backward, "compute backward blocks.1")
