"""What passes do on a device whose host runs ahead, or records a graph: on the CPU, which says that it is such a device.

The values are those of the CPU, since its work is done in order. The simulated device of `integration_tests/simulated`
checks what really may run late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    FlatParamError,
    NoStreams,
    OnDevice,
    RecordingCollectives,
    SingleCollectives,
    streams_of,
)
from flatparam_runtime import DivergenceError, PrefetchPlan, units_in
from flatparam_runtime.passes.forward import PREFETCH_NBYTES

from .models import Branches, Stack, batch
from .test_checkpointing import Model as Checkpointed
from .test_prefetch import BLOCKS as TRACK_BLOCKS
from .test_prefetch import place, track
from .wires import Wire
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
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]
SIDES = ["left", "right"]
COMPARISON = "parameters with a gradient"
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """A function: the CPU has streams with these properties from then on, wherever the layers ask for its streams."""

    def pretended(streams: OnDevice | None = None, **properties: bool) -> None:
        streams = streams or NoStreams(**properties)
        monkeypatch.undo()
        for name, module in list(sys.modules.items()):
            if name.startswith("flatparam_") and getattr(module, "streams_of", None) is streams_of:
                monkeypatch.setattr(module, "streams_of", lambda device: streams)

    return pretended


def loss(module: nn.Module, rank: int, *way: str) -> Tensor:
    out: Tensor = module(batch(rank), *way).square().mean()
    return out


def test_training_ahead(pretend: Pretend, ranks: int, use_orig_params: bool) -> None:
    """Steps of a host that runs ahead are those of a local module, bit by bit, and leave everything at rest."""
    pretend(runs_ahead=True)
    check_training(Stack, [loss] * 3, ranks, units=BLOCKS, use_orig_params=use_orig_params)


def test_branches_ahead(pretend: Pretend, use_orig_params: bool) -> None:
    """Passes that take another way than the one before, and gradients that only some parameters get."""
    pretend(runs_ahead=True)
    losses = [lambda module, rank, way=way: loss(module, rank, way) for way in ("lr", "r", "rl", "lr")]
    check_training(Branches, losses, 2, units=SIDES, use_orig_params=use_orig_params)


@pytest.mark.parametrize("watched", [False, True])
def test_a_gradient_is_a_mean_whenever_somebody_looks(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, use_orig_params: bool, watched: bool
) -> None:
    """Means are divided by one call at the end of a pass; a hook sees its own divided, and so is what is added."""
    calls: list[int] = []
    of_torch = torch._foreach_div_

    def counted(tensors: list[Tensor], divisor: float) -> None:
        calls.append(len(tensors))
        of_torch(tensors, divisor)

    def program(collectives: Collectives) -> tuple[Grads, list[Tensor], Grads]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        seen: list[Tensor] = []
        parameters = [p for unit in units_in(module) for handle in unit.handles for p in handle.exposure.parameters()]
        for parameter in parameters if watched else ():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        loss(module, collectives.rank).backward()
        once = full_gradients(module)
        loss(module, collectives.rank).backward()
        return once, seen, full_gradients(module)

    expected = run(3, program)
    pretend(runs_ahead=True)
    monkeypatch.setattr(torch, "_foreach_div_", counted)
    found = run(3, program)
    assert len(calls) == (0 if watched else 3), calls
    for (once, seen, twice), (same_once, same_seen, same_twice) in zip(found, expected, strict=True):
        check_same(once, same_once)
        check_same(twice, same_twice)
        assert len(seen) == len(same_seen)
        assert all(map(torch.equal, seen, same_seen))


def test_what_waits_to_be_divided_is_added_to(pretend: Pretend, use_orig_params: bool) -> None:
    """A unit that one backward pass reduces twice, by reentrant checkpoints, adds one mean to the other."""
    pretend(runs_ahead=True)

    def twice(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).sum() + module(batch(rank + 7)).sum()
        return out

    def step(collectives: Collectives) -> Grads:
        units = [f"parts.{number}.inner" for number in range(3)]
        module = sharded(lambda: Checkpointed(True), collectives, units=units, use_orig_params=use_orig_params)
        twice(module, collectives.rank).backward()
        return full_gradients(module)

    # By three nothing is divided as it is copied.
    expected = mean_gradients(seeded(lambda: Checkpointed(True)), twice, 3)
    for found in run(3, step):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(("small", "depth", "expected"), [(True, None, 3), (False, None, 1), (False, 2, 2)])
def test_small_units_are_gathered_further_ahead(
    pretend: Pretend, small: bool, depth: int | None, expected: int
) -> None:
    """One unit is gathered ahead, or as many as the plan says; all of them if they are small together.

    In the first pass these are the units in the order in which they were registered.
    """
    pretend(runs_ahead=True)
    wire = Wire()
    module = track(PrefetchPlan(depth), wire)
    for step in range(2):
        wire.log.clear()
        with PREFETCH_NBYTES.set_to(2**20 if small else 1):
            module(batch(0, step)).sum().backward()
        lines = wire.lines()
        first = place(lines, f"compute forward {TRACK_BLOCKS[0]}")
        ahead = [name for name in TRACK_BLOCKS[1:] if place(lines, f"begin all_gather {name}") < first]
        assert ahead == TRACK_BLOCKS[1 : 1 + expected]
        check_at_rest(module)


def test_a_first_pass_in_another_order(pretend: Pretend) -> None:
    """If the first pass does not go in the order of registration, nothing more is gathered ahead, and all is right."""
    pretend(runs_ahead=True)
    module = sharded(Branches, SingleCollectives(), units=SIDES)
    loss(module, 0, "rl").backward()
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Branches), lambda m, r: loss(m, r, "rl"), 1))


@pytest.mark.parametrize("trained", [False, True])
def test_a_divergence_is_told_later(pretend: Pretend, trained: bool) -> None:
    """Each rank raises for ranks that part: at once in the first passes, and in the next pass when the host runs ahead."""
    pretend(runs_ahead=True)

    def part(collectives: Collectives) -> int:
        module = sharded(Branches, collectives, units=SIDES)
        if trained:
            loss(module, collectives.rank, "lr").backward()
        for step in range(2):
            try:
                loss(module, collectives.rank, "lr" if collectives.rank else "rl").backward()
            except DivergenceError:
                return step
        return -1

    assert run(2, part) == [int(trained)] * 2


def test_inference_that_diverges(pretend: Pretend) -> None:
    """Without a backward pass the next pass tells, too."""
    pretend(runs_ahead=True)

    def part(collectives: Collectives) -> None:
        module = sharded(Branches, collectives, units=SIDES)
        with torch.no_grad():
            module(batch(collectives.rank), "lr")
            module(batch(collectives.rank), "lr" if collectives.rank else "rl")
            with pytest.raises(DivergenceError, match="run different units"):
                for _ in range(2):
                    module(batch(collectives.rank), "lr")

    run(2, part)


def test_a_backward_pass_that_raises(pretend: Pretend) -> None:
    """The pass after one that was interrupted is as if that one had not run."""
    pretend(runs_ahead=True)
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    out = module(batch())

    def interrupt(gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt

    out.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    loss(module, 0).backward()
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def captured(pretend: Pretend, module: nn.Module, step: Callable[[], Tensor], ledger: ByteLedger | None = None) -> None:
    """Warm up, then take a step of which the device says that it is captured."""
    pretend(runs_ahead=True)
    step().backward()
    zero_gradients(module)
    if ledger is not None:
        ledger.reset()
    pretend(runs_ahead=True, is_capturing=True)
    step().backward()


def test_a_step_that_is_captured(pretend: Pretend, use_orig_params: bool) -> None:
    """It has the gradients of any other, and does not compare the ranks, since the host would have to wait."""
    ledger = ByteLedger()
    ranks = RecordingCollectives(SingleCollectives(), ledger)
    module = sharded(Stack, ranks, units=BLOCKS, use_orig_params=use_orig_params)
    captured(pretend, module, lambda: loss(module, 0), ledger)
    assert COMPARISON not in ledger.by_label()
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))
    pretend(runs_ahead=True)
    zero_gradients(module)
    loss(module, 0).backward()
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def test_a_first_pass_cannot_be_captured(pretend: Pretend) -> None:
    """In the first pass the host compares the ranks, so the error says to run some steps before the capture."""
    pretend(runs_ahead=True, is_capturing=True)
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    with pytest.raises(FlatParamError, match="its first pass is being captured in a graph"):
        module(batch())


def test_a_captured_step_of_one_rank_may_lack_gradients(pretend: Pretend, use_orig_params: bool) -> None:
    """With one rank it is known without a look at the device which parameters got a gradient."""
    module = sharded(Branches, SingleCollectives(), use_orig_params=use_orig_params)
    captured(pretend, module, lambda: loss(module, 0, "l"))
    found: Grads = full_gradients(module)
    check_same(found, mean_gradients(seeded(Branches), lambda m, r: loss(m, r, "l"), 1))


def test_a_captured_step_of_ranks_may_not_lack_gradients(pretend: Pretend) -> None:
    """With two ranks, the host would have to ask the others: it is refused, and no parameter gets a gradient."""
    pretend(runs_ahead=True)

    def step(collectives: Collectives) -> None:
        module = sharded(Branches, collectives, use_orig_params=True)
        loss(module, collectives.rank, "lr").backward()
        zero_gradients(module)
        collectives.barrier()
        if collectives.rank == 0:
            pretend(runs_ahead=True, is_capturing=True)
        collectives.barrier()
        with pytest.raises(FlatParamError, match="not every parameter of it got a gradient"):
            loss(module, collectives.rank, "l").backward()
        assert all(parameter.grad is None for parameter in module.parameters())

    run(2, step)


class SeveralStreams:
    """Streams of a device whose host runs ahead; the test says which one is current."""

    def __init__(self) -> None:
        self.number = 1
        self.rest = NoStreams(runs_ahead=True)

    def current(self) -> int:
        return self.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rest, name)


def test_passes_on_changing_streams(pretend: Pretend, use_orig_params: bool) -> None:
    """Passes that begin on one stream and then on another have the gradients of a local module, whoever has hooks."""
    streams: Any = SeveralStreams()
    pretend(streams)
    module = sharded(Branches, SingleCollectives(), units=SIDES, use_orig_params=use_orig_params)
    for number, way in [(1, "lr"), (2, "lr"), (2, "r"), (1, "lr")]:
        streams.number = number
        zero_gradients(module)
        loss(module, 0, way).backward()
        check_at_rest(module)
        expected = mean_gradients(seeded(Branches), lambda m, r, way=way: loss(m, r, way), 1)
        check_same(full_gradients(module), expected)
