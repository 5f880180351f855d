"""The costs of a training program for one rank, planned or measured: two of them can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, final

import attrs

from flatparam_comm import Totals

__all__ = ["STAGES", "Costs", "Resting", "StepCosts"]

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
        """The differences from `other` (this minus other), under names; only those that are not zero."""
        mine, theirs = dict(self.facts()), dict(other.facts())
        names = [*mine, *(name for name in theirs if name not in mine)]
        differences = {name: mine.get(name, 0) - theirs.get(name, 0) for name in names}
        return {name: difference for name, difference in differences.items() if difference}

    def facts(self) -> Iterator[tuple[str, int]]:
        """Each number, under a name."""
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
