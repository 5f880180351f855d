"""The records of a pass: the order in which units run forward, and the state of a unit in a backward pass."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, final

import attrs

from flatparam_comm import Averaging, BufferPool, OnDevice, Transitions
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.unit import ForwardCall, LeafKey, Unit, WatchedHandle


@final
@attrs.define(eq=False)
class ForwardPass:
    """The units of one forward pass, in the order in which they began, and in the order in which they ended."""

    recorded: bool = False
    """Whether autograd records the outermost call."""
    stream: int = 0
    """The stream that was current when it began."""
    calls_before: int = 0
    """The number of unit calls in the last forward pass before it that autograd recorded."""
    began: list[Unit] = attrs.field(factory=list)
    ended: list[Unit] = attrs.field(factory=list)
    _places: dict[Unit, int] = attrs.field(factory=dict)
    _backwards: tuple[Unit, ...] = ()
    """The units in the order in which a backward pass is expected to need them, as far as `_turns` is up to date."""
    _turns: dict[Unit, int] = attrs.field(factory=dict)
    """The place of each unit in `_backwards`."""
    _ends: int = 0
    """The number of calls that had ended when these were made."""

    def begin(self, unit: Unit) -> None:
        """Note that a call of `unit` begins."""
        self._places.setdefault(unit, len(self._places))
        self.began.append(unit)

    def place(self, unit: Unit) -> int:
        """Return the number of units that began before the first call of `unit`; -1 if `unit` did not run."""
        return self._places.get(unit, -1)

    def before(self, unit: Unit) -> Iterator[Unit]:
        """The units that the backward pass is expected to need after `unit`: those that ended before it, backwards.

        Of a unit that ran several times only the last end counts. If `unit` did not run, there are none.
        """
        if self._ends != len(self.ended):
            self._ends, self._backwards = len(self.ended), tuple(dict.fromkeys(reversed(self.ended)))
            self._turns = {each: turn for turn, each in enumerate(self._backwards)}
        turn = self._turns.get(unit, len(self._backwards))
        return map(self._backwards.__getitem__, range(turn + 1, len(self._backwards)))


def next_forward(before: Sequence[Unit], now: Sequence[Unit], depth: int) -> Sequence[Unit]:
    """Return the `depth` units that follow the one that began last, if this pass is like the one before.

    Args:
        before: the units of the previous pass in the order in which they began.
        now: the units of this pass so far, in the same order.
    """
    place = len(now) - 1
    if 0 <= place < len(before) and before[place] is now[place]:
        return before[place + 1 : place + 1 + depth]
    return ()


class PassTree(Protocol):
    """The tree of units that passes are of, as far as a backward pass knows it."""

    units: tuple[Unit, ...]
    fingerprint: Fingerprint
    pool: BufferPool
    streams: OnDevice
    graphs: weakref.WeakSet[ForwardCall]
    """The outermost calls whose graph somebody has for a backward pass to come."""

    @property
    def latest_forward(self) -> ForwardPass:
        """Return the forward pass that is differentiated."""

    def end_backward(self, synced: bool) -> None:
        """Forget the backward pass, which has finished, and reduced gradients if `synced`."""


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
    trained: Sequence[WatchedHandle] | None = None
    """The flat parameters that are trained, with their watches, once that was looked up."""
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

    def give_back(self) -> None:
        """Give back what other units lend to the unit."""
        for lender in self.lent:
            self.unit.give_back(lender)
        self.lent.clear()
