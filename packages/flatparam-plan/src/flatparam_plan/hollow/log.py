"""The log of memory: every block's birth and death, in order."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from typing import final

import attrs

__all__ = ["Log"]


@final
@attrs.define(eq=False)
class Log:
    """The births and deaths of all blocks of memory, in order.

    `changes` has the number of a block for each birth, and its complement (`~number`) for each death; `sizes` has the
    bytes in use after each. A block's tag says what it was made for.
    """

    changes: array[int] = attrs.field(factory=lambda: array("q"))
    sizes: array[int] = attrs.field(factory=lambda: array("q"))
    nbytes: array[int] = attrs.field(factory=lambda: array("q"))
    """The bytes of each block."""
    tags: list[str] = attrs.field(factory=list)
    """The tag of each block; it may be changed later."""
    tag: str = "other"
    """The tag of the blocks that are born now."""
    in_use: int = 0

    def born(self, nbytes: int) -> int:
        """Note a new block, and return its number."""
        number = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.tags.append(self.tag)
        self._note(number, nbytes)
        return number

    def died(self, number: int) -> None:
        """Note that a block's memory was given back."""
        self._note(~number, -self.nbytes[number])

    def _note(self, change: int, nbytes: int) -> None:
        self.in_use += nbytes
        self.changes.append(change)
        self.sizes.append(self.in_use)

    def passing(self, nbytes: int) -> None:
        """Note memory that a kernel takes and gives back at once."""
        before, self.tag = self.tag, "inside a kernel"
        self.died(self.born(nbytes))
        self.tag = before

    def __len__(self) -> int:
        return len(self.changes)

    def peak(self, start: int, stop: int) -> int:
        """The most bytes in use between two places in the log."""
        before = self.sizes[start - 1] if start else 0
        return max(self.sizes[start:stop], default=before) if stop > start else before

    def place_of_peak(self, start: int, stop: int) -> int:
        """The place right after the first change between two places that reached the most bytes in use."""
        within = self.sizes[start:stop]
        return start + within.index(max(within)) + 1 if within else start

    def alive_at(self, place: int) -> dict[str, int]:
        """The bytes in use at a place of the log, by tag."""
        alive: dict[str, int] = defaultdict(int)
        for change in itertools.islice(self.changes, place):
            number = change if change >= 0 else ~change
            alive[self.tags[number]] += self.nbytes[number] if change >= 0 else -self.nbytes[number]
        return {tag: nbytes for tag, nbytes in alive.items() if nbytes}
