"""The record of a training program in hollow memory: the tape from which a plan is made."""

from __future__ import annotations

from array import array
from typing import NamedTuple, final

import attrs

from flatparam_plan.costs import Costs
from flatparam_plan.hollow import Log, Work
from flatparam_plan.training import Call, Setup

__all__ = ["Entry", "Rehearsal", "UnitFacts"]


@final
class Entry(NamedTuple):
    """Something that happened, in the order of the host.

    It is a tuple, and no class of attrs, since the plan of a thousand blocks has a hundred thousand of them.

    `kind` is "stage", "kernels", "issued", "waited", or that of a unit's event. `place` is its place in the log of
    memory. For "kernels", `start` and `stop` are places in the list of kernels.
    """

    kind: str
    stage: str
    step: int
    unit: str
    place: int
    start: int = 0
    stop: int = 0
    nbytes: int = 0
    call: Call | None = None


@final
@attrs.frozen
class UnitFacts:
    """The facts of a unit: its name, its bytes, and whether it frees them."""

    name: str
    kind: str
    numel: int
    full_nbytes: int
    """The bytes of the full parameters in their compute dtype, padding included."""
    shard_nbytes: int
    """The bytes of this rank's shard."""
    padding_nbytes: int
    """The bytes of the full parameters that are no parameter."""
    frees_after_forward: bool


@final
@attrs.define(eq=False)
class Rehearsal:
    """The record of a program in hollow memory."""

    setup: Setup
    log: Log
    """Every block of memory."""
    entries: list[Entry]
    works: list[Work]
    kernels: array[int]
    """The number of each kernel's work, in the order in which they run."""
    units: tuple[UnitFacts, ...]
    costs: Costs
    steps: int
    unmeasured: tuple[str, ...]
    """The names of kernels that may take memory of their own that is not in the log."""
    stop: int
    """The place in the log of memory at which the last step has ended."""
    is_laid_out: bool = False
    """Whether some of the blocks were not run, and do what those before them did."""
    notes: tuple[str, ...] = ()
    """How the program is trained, other than the model says."""

    def last_step(self) -> list[Entry]:
        """The entries of the last step."""
        before = ("building", "wrapping")
        return [each for each in self.entries if each.step == self.steps - 1 and each.stage not in before]

    def entry_at(self, place: int) -> Entry:
        """The last entry up to a place in the log of memory."""
        before = [each for each in self.entries if each.place <= place]
        return before[-1] if before else self.entries[0]
