"""The order in which units run, learned from the previous passes, and the units that come next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import attrs

from flatparam_runtime.unit import Unit


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
