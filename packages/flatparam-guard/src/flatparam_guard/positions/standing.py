"""The last collectives of the ranks of a host, as their pages tell them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, final

import attrs
import torch

from flatparam_comm.errors import told_steps
from flatparam_guard.positions.page import DTYPES, OPS, REDUCTIONS, REMEMBERED, STEPS, TEXT, Page

__all__ = ["Position", "Standing", "Standings"]

#: The late ranks that a message describes.
_TOLD: Final = 4


class Neighbours(Protocol):
    """The memory of the other processes of this host."""

    def find(self, rank: int, key: int) -> memoryview | None:
        """The page with this key of `rank`, as far as it is known by now."""
        ...

    def describe(self, rank: int) -> str:
        """The process of `rank`, and whether it is stopped."""
        ...


@final
@attrs.frozen
class Position:
    """A collective, as far as it has to be the same on all ranks; `detail` is the reduction, or the root."""

    op: str
    dtype: torch.dtype | None = None
    numel: int = 0
    detail: int = 0

    @classmethod
    def from_words(cls, code: int, numel: int) -> Position:
        """The position with this code (see `code_of`) and number of elements."""
        return cls(OPS[code >> 24], DTYPES[code >> 16 & 0xFF], numel, code & 0xFFFF)

    def __str__(self) -> str:
        if self.dtype is None:
            return self.op
        detail = f" from rank {self.detail}" if self.op == "broadcast" else ""
        if self.op in ("reduce_scatter", "all_reduce"):
            detail = f" by {REDUCTIONS[self.detail].name}"
        return f"{self.op} of {self.numel} x {str(self.dtype).removeprefix('torch.')}{detail}"


@final
@attrs.frozen
class Standing:
    """The last collective of a rank on a group: its number, counted from 1, what it is, and its process."""

    number: int
    text: str
    """The operation and its label, which is the unit's name; empty before the first collective."""
    position: Position | None
    process: str
    steps: int = 0
    """The optimizer steps that its process had done then."""

    @classmethod
    def told_by(cls, words: memoryview, process: str) -> Standing:
        """The standing of the rank that has written these words."""
        headers = _headers(words).tolist()
        header = max(headers)
        if header == 0:
            return cls(0, "", None, process)
        numel = words[2 + 2 * headers.index(header)]
        position = Position.from_words(header & 0x7FFFFFFF, numel)
        return cls(header >> 31, _call_of(words), position, process, words[STEPS])

    def __str__(self) -> str:
        if self.position is None:
            return f"none ({self.process})"
        nbytes = self.position.numel * (0 if self.position.dtype is None else self.position.dtype.itemsize)
        last = f"{self.text}, {nbytes:,} bytes, {told_steps(self.steps)}"
        return f"{self.number}, the last {last} ({self.process})"


@final
@attrs.frozen(eq=False)
class Standings:
    """The last collectives of the other ranks of this host on one group."""

    page: Page
    neighbours: Neighbours

    def find(self, ranks: Iterable[int]) -> None:
        """Have the page compared with those of these ranks of the world, as far as their memory is known."""
        found = [(rank, self.neighbours.find(rank, self.page.key)) for rank in ranks]
        self.page.found = [(rank, words) for rank, words in found if words is not None]

    def last_of(self, rank: int) -> str | None:
        """The last collective of `rank` of the world, and after which step; None if its memory is not known.

        It is empty if there was none.
        """
        theirs = self._there().get(rank)
        if theirs is None:
            return None
        call = _call_of(theirs)
        return f"{call}, {told_steps(theirs[STEPS])}" if call else ""

    def others(self) -> dict[int, Standing]:
        """The standing of each other rank of this host, by its number within the world."""
        found = self._there()
        return {
            rank: Standing.told_by(words, self.neighbours.describe(rank)) for rank, words in found.items()
        }

    def _there(self) -> dict[int, memoryview]:
        """The pages of the ranks that have not left the group."""
        return {rank: words for rank, words in self.page.found if words[0] == self.page.key}

    def own(self, process: str) -> Standing:
        """The standing of this rank, whose process is described so."""
        return Standing.told_by(self.page.words, process)

    def describe_late(self, number: int) -> str:
        """The ranks that have not issued collective `number`, and their last collectives; empty if there are none."""
        late = [rank for rank, words in self._there().items() if max(_headers(words)) >> 31 < number]
        told = "; ".join(
            f"rank {rank} ({self.neighbours.describe(rank)}), whose last collective was {self.last_of(rank) or 'none'}"
            for rank in late[:_TOLD]
        )
        more = f"; and {len(late) - _TOLD} more" if len(late) > _TOLD else ""
        return f"not there: {told}{more}" if late else ""


def _headers(words: memoryview) -> memoryview:
    """For each collective that is remembered, its number and its code in one word."""
    return words[1 : 1 + 2 * REMEMBERED : 2]


def _call_of(words: memoryview) -> str:
    return bytes(words.cast("B")[TEXT]).rstrip(b"\0").decode(errors="replace")
