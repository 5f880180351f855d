"""The page of one process group: what this rank issues, written where the other ranks of its host read it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, Protocol, final
from zlib import crc32

import attrs
import torch

from flatparam_comm.checks import Site
from flatparam_comm.collectives import ReduceOp
from flatparam_comm.errors import describe_call, told_steps
from flatparam_comm.relay.watched_call import ACTIVITY

__all__ = ["PAGE_NBYTES", "Page", "Position", "Standing", "code_of", "key_of"]

PAGE_NBYTES: Final = 4096
#: Collectives that a page remembers. A rank that is further ahead of another one is not compared with it.
_REMEMBERED: Final = 128
#: Words of 8 bytes: the group's name, two for each remembered collective, and the optimizer steps that are done.
_WORDS: Final = 1 + 2 * _REMEMBERED + 1
_STEPS: Final = _WORDS - 1
#: The bytes of a page that hold the last collective, as text.
_TEXT: Final = slice(_WORDS * 8, _WORDS * 8 + 256)
#: The late ranks that a message describes.
_TOLD: Final = 4
_OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "barrier", "subgroup"),
    "all_to_all",
)
_REDUCTIONS: Final = tuple(ReduceOp)
_DTYPES: Final = (
    None,
    *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str),
)
_OP_CODES: Final = {op: number << 24 for number, op in enumerate(_OPS)}
_DTYPE_CODES: Final = {dtype: number << 16 for number, dtype in enumerate(_DTYPES)}


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
        """The position with this `code` and number of elements."""
        return cls(_OPS[code >> 24], _DTYPES[code >> 16 & 0xFF], numel, code & 0xFFFF)

    def __str__(self) -> str:
        if self.dtype is None:
            return self.op
        detail = f" from rank {self.detail}" if self.op == "broadcast" else ""
        if self.op in ("reduce_scatter", "all_reduce"):
            detail = f" by {_REDUCTIONS[self.detail].name}"
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

    def __str__(self) -> str:
        if self.position is None:
            return f"none ({self.process})"
        nbytes = self.position.numel * (0 if self.position.dtype is None else self.position.dtype.itemsize)
        last = f"{self.text}, {nbytes:,} bytes, {told_steps(self.steps)}"
        return f"{self.number}, the last {last} ({self.process})"


def code_of(op: str, dtype: torch.dtype | None, detail: int) -> int:
    """A position without its number of elements, in 31 bits."""
    return _OP_CODES[op] | _DTYPE_CODES[dtype] | (detail & 0xFFFF)


def key_of(name: str) -> int:
    """The first word of the page of the group `name`; never 0."""
    return crc32(name.encode()) + 1


@final
class Page:
    """The page of one group."""

    __slots__ = ("_fence", "_found", "_key", "_neighbours", "_text", "_texts", "_words")

    def __init__(self, neighbours: Neighbours, key: int, words: memoryview) -> None:
        """Begin with empty `words`, `PAGE_NBYTES` bytes; the neighbours' pages of the group have this key."""
        # A group of the same name may have been before it.
        words[:_WORDS] = memoryview(bytes(8 * _WORDS)).cast("q")
        words[0] = key
        self._neighbours, self._key, self._words = neighbours, key, words
        self._text = words.cast("B")[_TEXT]
        self._found: list[tuple[int, memoryview]] = []
        self._texts: dict[tuple[str, str], bytes] = {}
        self._fence = threading.Lock()

    def find(self, ranks: Iterable[int]) -> None:
        """Compare with these ranks of the world from now on, as far as their memory is known."""
        found = [(rank, self._neighbours.find(rank, self._key)) for rank in ranks]
        self._found = [(rank, words) for rank, words in found if words is not None]

    def late(self, number: int) -> list[int]:
        """The ranks of this host that have not issued collective `number` of the group; numbered within the world."""
        return [rank for rank, words in self._found if max(words[1 : 1 + 2 * _REMEMBERED : 2]) >> 31 < number]

    def last_of(self, rank: int) -> str | None:
        """The last collective of `rank` of the world, and after which step; None if its memory is not known.

        It is empty if there was none.
        """
        theirs = dict(self._found).get(rank)
        return None if theirs is None else _text_of(theirs)

    def standings(self) -> dict[int, Standing]:
        """The last collective of each other rank of this host, by its number within the world."""
        return {rank: _standing(words, self._neighbours.describe(rank)) for rank, words in self._found}

    def own_standing(self, process: str) -> Standing:
        """The last collective of this rank."""
        return _standing(self._words, process)

    def describe_late(self, number: int) -> str:
        """The ranks that have not issued collective `number`, and their last collectives; empty if there are none."""
        late = self.late(number)
        told = "; ".join(
            f"rank {rank} ({self._neighbours.describe(rank)}), whose last collective was {self.last_of(rank) or 'none'}"
            for rank in late[:_TOLD]
        )
        more = f"; and {len(late) - _TOLD} more" if len(late) > _TOLD else ""
        return f"not there: {told}{more}" if late else ""

    def enter(self, number: int, site: Site, code: int, numel: int) -> tuple[int, Position] | None:
        """Write down collective `number` of the group; returns a rank that issued a different one, and which."""
        words, at = self._words, 1 + 2 * (number % _REMEMBERED)
        header = number << 31 | code
        words[at + 1] = numel
        words[at] = header
        words[_STEPS] = ACTIVITY.steps
        name = site.op, site.label
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = _padded(describe_call(*name))
        self._text[:] = text
        # The processor may not put off the words above until it has read those below; taking a lock forbids that.
        with self._fence:
            pass
        for rank, theirs in self._found:
            found = theirs[at]
            if found != header or theirs[at + 1] != numel:
                different = self._different(found, theirs, at, header, numel)
                if different is not None:
                    return rank, different
        return None

    @staticmethod
    def _different(found: int, theirs: memoryview, at: int, header: int, numel: int) -> Position | None:
        if found >> 31 != header >> 31:
            # That rank is not there yet, or far ahead.
            return None
        other = theirs[at + 1]
        if theirs[at] != found or (found == header and other == numel):
            return None
        return Position.from_words(found & 0x7FFFFFFF, other)


def _call_of(words: memoryview) -> str:
    return bytes(words.cast("B")[_TEXT]).rstrip(b"\0").decode(errors="replace")


def _text_of(words: memoryview) -> str:
    call = _call_of(words)
    return f"{call}, {told_steps(words[_STEPS])}" if call else ""


def _standing(words: memoryview, process: str) -> Standing:
    headers = words[1 : 1 + 2 * _REMEMBERED : 2].tolist()
    header = max(headers)
    if header == 0:
        return Standing(0, "", None, process)
    numel = words[2 + 2 * headers.index(header)]
    position = Position.from_words(header & 0x7FFFFFFF, numel)
    return Standing(header >> 31, _call_of(words), position, process, words[_STEPS])


def _padded(text: str) -> bytes:
    """The text in exactly as many bytes as there are for it."""
    nbytes = _TEXT.stop - _TEXT.start
    return text.encode()[:nbytes].ljust(nbytes, b"\0")
