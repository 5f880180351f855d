"""Counts memory and bytes while a training program runs: at rest, and in each stage of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import ByteLedger, Totals
from flatparam_plan.costs import STAGES, Costs, Resting, StepCosts
from flatparam_plan.training import Trained

__all__ = ["Counting", "StageSpan", "states_of"]

BEFORE: Final = ("building", "wrapping")


def by_dtype(tensors: Iterable[Tensor | None]) -> dict[str, int]:
    """The bytes of the memory under `tensors`, each memory once, by dtype."""
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
    """The tensors of an optimizer's state."""
    if optimizer is None:
        return []
    return [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


@final
@attrs.frozen
class StageSpan:
    """A stage of a step, between two places."""

    stage: str
    step: int
    start: int
    stop: int


@attrs.define(eq=False)
class Counting:
    """A watcher that notes where stages begin and end, what rests, and what the ledger says of each step."""

    ledger: ByteLedger
    place: Callable[[], int]
    """Returns a new place among the allocations."""
    trained: Trained | None = None
    spans: list[StageSpan] = attrs.field(factory=list)
    gradients: dict[str, int] = attrs.field(factory=dict)
    collectives: list[dict[str, Totals]] = attrs.field(factory=list)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """See `Watcher.stage`."""
        start = self.place()
        yield
        if name == "backward" and self.trained is not None:
            self.gradients = by_dtype(parameter.grad for parameter in self.trained.model.parameters())
        if name == "zero_grad":
            self.collectives.append(self.ledger.by_op())
            self.ledger.reset()
        self.spans.append(StageSpan(name, step, start, self.place()))

    def made(self, trained: Trained) -> None:
        """See `Watcher.made`."""
        self.trained = trained
        self.ledger.reset()

    def costs(self, peak: Callable[[int, int], int], left: int) -> Costs:
        """The costs; `peak` says how many bytes were in use at most between two places."""
        assert self.trained is not None, "it was trained"
        resting = Resting(
            by_dtype(self.trained.model.parameters()),
            self.gradients,
            by_dtype(states_of(self.trained.optimizer)),
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
