"""The record of a unit in one backward pass."""

from __future__ import annotations

import enum
from typing import Final, TypeAlias, final

import attrs

from flatparam_comm import Averaging, Transitions
from flatparam_runtime.unit import ForwardCall, Unit

LeafKey: TypeAlias = tuple[int, int]
"""A leaf of a unit: the number of its handle, and its index there."""


class Stage(enum.Enum):
    """The stage of a unit in a backward pass."""

    EXPECTED = "a parameter of it will get a gradient, and nothing has reached it yet"
    ACTIVE = "it waits for gradients"
    COMPLETE = "it has every gradient, and waits for its turn to be reduced"
    DONE = "its turn has come"

    # The hash of Enum is written in Python.
    __hash__ = object.__hash__


STAGES: Final = Transitions(
    "stage in the backward pass",
    {
        Stage.EXPECTED: frozenset({Stage.ACTIVE}),
        Stage.ACTIVE: frozenset({Stage.COMPLETE}),
        # A gradient of a reentrant checkpoint's inner run may reach a unit that was complete.
        Stage.COMPLETE: frozenset({Stage.ACTIVE, Stage.DONE}),
        Stage.DONE: frozenset({Stage.ACTIVE}),
    },
)


@final
@attrs.define(eq=False)
class UnitBackward:
    """The state of a unit in one backward pass, from the first thing that is known of it there."""

    unit: Unit
    leaves: set[LeafKey]
    """The leaves whose gradients the engine is going to compute, and for which the unit waits."""
    run: int
    """The autograd run that computes these gradients. A reentrant checkpoint has an inner run of its own, which may
    reach a leaf that the outer run reaches too."""
    stage: Stage = Stage.EXPECTED
    call: ForwardCall | None = None
    """The forward call that is differentiated, the unit's last one, once a gradient has reached an output of it."""
    inputs: set[object] = attrs.field(factory=set)
    """The inputs of the unit's calls whose gradients it waits for."""
    averaging: Averaging = attrs.field(init=False)
    """The factors that make the mean of these gradients over ranks; there from ACTIVE on."""
    keeps: bool = False
    """Whether gradients stay where autograd leaves them until the unit is complete."""
    keeps_parameters: bool = False
    """Whether the full parameters stay until the end of the pass: code around the unit may still read some."""
    lent: list[Unit] = attrs.field(factory=list)
    """The units of which the unit's forward calls have read parameters, and that lend them again."""

    def __str__(self) -> str:
        return str(self.unit)

    def move(self, stage: Stage) -> None:
        """Take a step of the stage table."""
        # The shortcut for every legal step.
        self.stage = stage if stage in STAGES.steps[self.stage] else STAGES.move(self.stage, stage, who=self)
