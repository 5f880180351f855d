"""The page on which the other ranks of the host read what this one has issued on a process group."""

from __future__ import annotations

import threading
from typing import Final, final
from zlib import crc32

import torch

from flatparam_comm.checks import Site
from flatparam_comm.collectives import ReduceOp
from flatparam_comm.errors import describe_call
from flatparam_guard.activity import ACTIVITY

__all__ = [
    "DTYPES",
    "OPS",
    "PAGE_NBYTES",
    "REDUCTIONS",
    "REMEMBERED",
    "STEPS",
    "TEXT",
    "Page",
    "code_of",
    "key_of",
]

PAGE_NBYTES: Final = 4096
#: Collectives that a page remembers. A rank that is further ahead of another one is not compared with it.
REMEMBERED: Final = 128
#: Words of 8 bytes: the group's name, two for each remembered collective, and the optimizer steps that are done.
_WORDS: Final = 1 + 2 * REMEMBERED + 1
STEPS: Final = _WORDS - 1
#: The bytes of a page that hold the last collective, as text.
TEXT: Final = slice(_WORDS * 8, _WORDS * 8 + 256)
OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "barrier", "subgroup"),
    "all_to_all",
)
REDUCTIONS: Final = tuple(ReduceOp)
DTYPES: Final = (
    None,
    *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str),
)
_OP_CODES: Final = {op: number << 24 for number, op in enumerate(OPS)}
_DTYPE_CODES: Final = {dtype: number << 16 for number, dtype in enumerate(DTYPES)}


def code_of(op: str, dtype: torch.dtype | None, detail: int) -> int:
    """A collective without its number of elements, in 31 bits; `detail` is the reduction, or the root."""
    return _OP_CODES[op] | _DTYPE_CODES[dtype] | (detail & 0xFFFF)


def key_of(name: str) -> int:
    """The first word of the page of the group `name`; never 0."""
    return crc32(name.encode()) + 1


@final
class Page:
    """The page of one group, and those of the group's other ranks, as far as they are known."""

    __slots__ = ("_fence", "_text", "_texts", "found", "key", "words")

    def __init__(self, key: int, words: memoryview) -> None:
        """Begin with empty `words`, `PAGE_NBYTES` bytes; the neighbours' pages of the group have this key."""
        # A group of the same name may have been before it.
        words[:_WORDS] = memoryview(bytes(8 * _WORDS)).cast("q")
        words[0] = key
        self.key, self.words = key, words
        self.found: list[tuple[int, memoryview]] = []
        """The pages of other ranks, by their numbers within the world."""
        self._text = words.cast("B")[TEXT]
        self._texts: dict[tuple[str, str], bytes] = {}
        self._fence = threading.Lock()

    def leave(self) -> None:
        """Leave the page to a different group: this one is destroyed."""
        self.words[0] = 0

    def enter(self, number: int, site: Site, code: int, numel: int) -> tuple[int, int, int] | None:
        """Write down collective `number` of the group.

        Returns:
            A rank that issued a different one, with the code and the number of elements of that.
        """
        words, at = self.words, 1 + 2 * (number % REMEMBERED)
        header = number << 31 | code
        words[at + 1] = numel
        words[at] = header
        words[STEPS] = ACTIVITY.steps
        name = site.op, site.label
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = _padded(describe_call(*name))
        self._text[:] = text
        # The processor may not put off the words above until it has read those below; taking a lock forbids that.
        with self._fence:
            pass
        for rank, theirs in self.found:
            found = theirs[at]
            if found != header or theirs[at + 1] != numel:
                other = theirs[at + 1]
                # That rank may not be there yet, or be far ahead, or have left the group; and it may have written while
                # these were read.
                is_of_this = found >> 31 == number and theirs[at] == found and theirs[0] == self.key
                if is_of_this and (found != header or other != numel):
                    return rank, found & 0x7FFFFFFF, other
        return None


def _padded(text: str) -> bytes:
    """The text in exactly as many bytes as there are for it."""
    nbytes = TEXT.stop - TEXT.start
    return text.encode()[:nbytes].ljust(nbytes, b"\0")
