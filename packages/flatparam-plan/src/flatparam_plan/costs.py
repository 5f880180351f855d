"""The costs of a training program for one rank, planned or measured: two of them can be compared."""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import ByteLedger, RecordingCollectives, Topology, Totals
from flatparam_files import without_collector
from flatparam_plan.allocations import allocations, mark
from flatparam_plan.training import Setup, Trained, TrainingProgram, train

STAGES: Final = ("forward", "backward", "clipping", "optimizer")


@final
@attrs.frozen
class Resting:
    """The bytes that stay from step to step, by dtype."""

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    """From the backward pass to `zero_grad()`."""
    states: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All bytes, of the gradients too."""
        return sum(sum(each.values()) for each in (self.parameters, self.gradients, self.states))


@final
@attrs.frozen
class StepCosts:
    """The memory that one step takes, and the bytes that it sends."""

    peaks: Mapping[str, int]
    """The most bytes at once that torch's allocator has given out, in each stage of the step."""
    collectives: Mapping[str, Totals]
    """The collectives by operation: their number, the bytes of full buffers, and the bytes that this rank sends."""

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return max(self.peaks.values())

    @property
    def sent_nbytes(self) -> int:
        """The bytes that this rank sends."""
        return sum(totals.sent_nbytes for totals in self.collectives.values())


@final
@attrs.frozen
class Costs:
    """The bytes that a rank holds, takes at most and sends: while the model is built and wrapped, and in each step."""

    resting: Resting
    building: int
    """The most bytes at once until the model is wrapped."""
    steps: tuple[StepCosts, ...]
    left: int
    """The bytes in use after the last step."""

    @property
    def peak(self) -> int:
        """The most bytes at once of any step."""
        return max(step.peak for step in self.steps)

    def errors(self, other: Costs) -> dict[str, int]:
        """Return the differences from `other` (this minus other), under names; only those that are not zero."""
        mine, theirs = dict(self.facts()), dict(other.facts())
        names = [*mine, *(name for name in theirs if name not in mine)]
        differences = {name: mine.get(name, 0) - theirs.get(name, 0) for name in names}
        return {name: difference for name, difference in differences.items() if difference}

    def facts(self) -> Iterator[tuple[str, int]]:
        """Yield each number, under a name."""
        for what in ("parameters", "gradients", "states"):
            for dtype, nbytes in getattr(self.resting, what).items():
                yield f"{what} in {dtype}", nbytes
        yield "peak of building", self.building
        yield "left after the last step", self.left
        for number, step in enumerate(self.steps, start=1):
            for stage, nbytes in step.peaks.items():
                yield f"peak of {stage} in step {number}", nbytes
            for op, totals in step.collectives.items():
                yield f"{op} calls in step {number}", totals.count
                yield f"{op} bytes in step {number}", totals.payload_nbytes
                yield f"{op} bytes sent in step {number}", totals.sent_nbytes


# Measuring: the costs of a run of a training program


def recorded(topology: Topology, ledger: ByteLedger) -> Topology:
    """Return the same groups, with a ledger of what passes."""
    replicate = topology.replicate

    def with_ledger(group: Any) -> Any:
        return group if group.size == 1 else RecordingCollectives(group, ledger)

    return Topology(with_ledger(topology.shard), None if replicate is None else with_ledger(replicate))


def measure(program: TrainingProgram, setup: Setup, topology: Topology, *, steps: int = 2) -> Costs:
    """Run `program` for real on the ranks of `topology`, and return what it has cost this rank.

    Memory is what torch's CPU allocator reports of this thread and of the backward passes that it runs; bytes are
    those of the ledger.
    """
    ledger = ByteLedger()
    numbers = itertools.count()

    def place() -> int:
        mark()
        return next(numbers)

    counting = Counting(ledger, place)
    # torch's optimizers import it at first use, and what that import raises and catches keeps tensors alive.
    importlib.import_module("torch._dynamo")
    gc.collect()
    with without_collector():
        with allocations() as found:
            trained = train(program, setup, recorded(topology, ledger), counting, steps=steps)
            last = place()
        costs = counting.costs(found.peak_between, sum(found.sizes[: found.places[last]]))
        del trained
    return costs


# Counting, while a training program runs: at rest, and in each stage of a step


BEFORE: Final = ("building", "wrapping")


def by_dtype(tensors: Iterable[Tensor | None]) -> dict[str, int]:
    """Return the bytes of the memory under `tensors`, each memory once, by dtype."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            name = str(tensor.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + storage.nbytes()
    return found


def states_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    if optimizer is None:
        return []
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@final
@attrs.frozen
class _StageSpan:
    """A stage of a step, between two places."""

    stage: str
    step: int
    start: int
    stop: int


@final
@attrs.define(eq=False)
class Counting:
    """A watcher that notes where stages begin and end, what rests, and what the ledger says of each step."""

    ledger: ByteLedger
    place: Callable[[], int]
    """Returns a new place among the allocations."""
    trained: Trained | None = None
    spans: list[_StageSpan] = attrs.field(factory=list)
    gradients: dict[str, int] = attrs.field(factory=dict)
    collectives: list[dict[str, Totals]] = attrs.field(factory=list)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Note where the stage lies, and what its collectives have sent."""
        start = self.place()
        yield
        if name == "backward" and self.trained is not None:
            self.gradients = by_dtype(parameter.grad for parameter in self.trained.model.parameters())
        if name == "zero_grad":
            self.collectives.append(self.ledger.by_op())
            self.ledger.reset()
        self.spans.append(_StageSpan(name, step, start, self.place()))

    def made(self, trained: Trained) -> None:
        """Keep what is counted at rest; what has been sent so far was for wrapping."""
        self.trained = trained
        self.ledger.reset()

    def costs(self, peak: Callable[[int, int], int], left: int) -> Costs:
        """Return the costs; `peak` says how many bytes were in use at most between two places."""
        assert self.trained is not None, "it was trained"
        resting = Resting(
            by_dtype(self.trained.model.parameters()), self.gradients, by_dtype(states_of(self.trained.optimizer))
        )
        steps = []
        for step, collectives in enumerate(self.collectives):
            peaks: dict[str, int] = {}
            for span in self.spans:
                if span.step == step and span.stage in STAGES:
                    peaks[span.stage] = max(peaks.get(span.stage, 0), peak(span.start, span.stop))
            steps.append(StepCosts(peaks, collectives))
        built = max(peak(span.start, span.stop) for span in self.spans if span.stage in BEFORE)
        return Costs(resting, built, tuple(steps), left)
