"""The positions of the ranks of one host: what each has issued, in memory that it writes and the others read.

A rank that issues a collective first writes down its number and what it is, and then reads what its peers wrote under
this number. If ranks diverge, the last of them to arrive sees it, and does not issue its collective: gloo would end the
process when it receives a message that is longer than expected.

Each process has one file without a name (`memfd_create`), with a page for each of its groups. The others map it through
`/proc`, and keep it when the process has died, so that its last collective can be told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol, final
from zlib import crc32

import attrs
import torch

from flatparam_comm.checks import Site
from flatparam_comm.collectives import ReduceOp
from flatparam_comm.errors import describe_call, told_steps
from flatparam_comm.hosts import host_identity, make_sealed_memory
from flatparam_guard.activity import ACTIVITY

#: The late ranks that a message describes.
_TOLD: Final = 4


class Neighbours(Protocol):
    """The memory of the other processes of this host."""

    def find(self, rank: int, key: int) -> memoryview | None:
        """Return the page with this key of `rank`, as far as it is known by now."""

    def describe(self, rank: int) -> str:
        """Return the process of `rank`, and whether it is stopped."""


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
        """Return the position with this code (see `code_of`) and number of elements."""
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

    @classmethod
    def told_by(cls, words: memoryview, process: str) -> Standing:
        """Return the standing of the rank that has written these words."""
        headers = _headers(words).tolist()
        header = max(headers)
        if header == 0:
            return cls(0, "", None, process)
        numel = words[2 + 2 * headers.index(header)]
        position = Position.from_words(header & 0x7FFFFFFF, numel)
        return cls(header >> 31, _call_of(words), position, process, words[_STEPS])

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
        """Return the last collective of `rank` of the world, and after which step; None if its memory is not known.

        It is empty if there was none.
        """
        theirs = self._there().get(rank)
        if theirs is None:
            return None
        call = _call_of(theirs)
        return f"{call}, {told_steps(theirs[_STEPS])}" if call else ""

    def others(self) -> dict[int, Standing]:
        """Return the standing of each other rank of this host, by its number within the world."""
        found = self._there()
        return {rank: Standing.told_by(words, self.neighbours.describe(rank)) for rank, words in found.items()}

    def _there(self) -> dict[int, memoryview]:
        """Return the pages of the ranks that have not left the group."""
        return {rank: words for rank, words in self.page.found if words[0] == self.page.key}

    def own(self, process: str) -> Standing:
        """Return the standing of this rank, whose process is described so."""
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
    return words[1 : 1 + 2 * _REMEMBERED : 2]


def _call_of(words: memoryview) -> str:
    return bytes(words.cast("B")[_TEXT]).rstrip(b"\0").decode(errors="replace")


# The memory of a process, and that of the others that it has found


#: The groups of a process that have a page; later ones go without. Pages that nobody writes take no memory.
_PAGES: Final = 1024


@final
@attrs.frozen
class Offer:
    """The facts by which a process on the same host finds the memory of another one."""

    host: tuple[str, ...]
    pid: int
    fd: int


@final
class Board:
    """The memory of this process, and those of the others that were found."""

    __slots__ = ("_peers", "_pids", "_words", "fd")

    def __init__(self) -> None:
        """Make this process's memory; raises OSError or AttributeError if the system has no such memory."""
        self.fd = make_sealed_memory("flatparam positions", _PAGES * PAGE_NBYTES)
        self._words = _map(self.fd, writable=True)
        self._peers: dict[int, memoryview] = {}
        self._pids: dict[int, int] = {}

    @property
    def offer(self) -> Offer:
        """The facts by which other processes find this memory."""
        return Offer(host_identity(), os.getpid(), self.fd)

    def attach(self, rank: int, offer: Offer) -> None:
        """Map the memory of `rank` if it is on this host, and the system allows it."""
        if rank in self._peers or offer.host != host_identity():
            return
        with contextlib.suppress(OSError, ValueError):
            theirs = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._peers[rank] = _map(theirs, writable=False)
                self._pids[rank] = offer.pid
            finally:
                os.close(theirs)

    def page(self, name: str) -> Page | None:
        """Return this process's page of the group `name`; None if there is none left."""
        key = _key_of(name)
        for words in _pages(self._words):
            if words[0] in (0, key):
                return Page(key, words)
        return None

    def describe(self, rank: int) -> str:
        """Return the process of `rank`, and whether it is stopped."""
        pid = self._pids[rank]
        return f"process {pid}, which is stopped" if _is_stopped(pid) else f"process {pid}"

    def find(self, rank: int, key: int) -> memoryview | None:
        """Return the page with this key of `rank`, as far as it is known by now."""
        theirs = self._peers.get(rank)
        return None if theirs is None else next((each for each in _pages(theirs) if each[0] == key), None)

    def close(self) -> None:
        """Close the descriptor; what others have mapped remains theirs."""
        os.close(self.fd)


def _map(fd: int, *, writable: bool) -> memoryview:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return memoryview(mmap.mmap(fd, _PAGES * PAGE_NBYTES, access=access)).cast("q")


def _pages(words: memoryview) -> Iterable[memoryview]:
    step = PAGE_NBYTES // 8
    return (words[at : at + step] for at in range(0, len(words), step))


# The page on which the other ranks of the host read what this one has issued on a process group


PAGE_NBYTES: Final = 4096
#: Collectives that a page remembers. A rank that is further ahead of another one is not compared with it.
_REMEMBERED: Final = 128
#: Words of 8 bytes: the group's name, two for each remembered collective, and the optimizer steps that are done.
_WORDS: Final = 1 + 2 * _REMEMBERED + 1
_STEPS: Final = _WORDS - 1
#: The bytes of a page that hold the last collective, as text.
_TEXT: Final = slice(_WORDS * 8, _WORDS * 8 + 256)
_OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "barrier", "subgroup"),
    "all_to_all",
)
_REDUCTIONS: Final = tuple(ReduceOp)
_DTYPES: Final = (None, *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))
_OP_CODES: Final = {op: number << 24 for number, op in enumerate(_OPS)}
_DTYPE_CODES: Final = {dtype: number << 16 for number, dtype in enumerate(_DTYPES)}


def code_of(op: str, dtype: torch.dtype | None, detail: int) -> int:
    """Return a collective without its number of elements, in 31 bits; `detail` is the reduction, or the root."""
    return _OP_CODES[op] | _DTYPE_CODES[dtype] | (detail & 0xFFFF)


def _key_of(name: str) -> int:
    """Return the first word of the page of the group `name`; never 0."""
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
        self._text = words.cast("B")[_TEXT]
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
        words, at = self.words, 1 + 2 * (number % _REMEMBERED)
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
    """Return the text in exactly as many bytes as there are for it."""
    nbytes = _TEXT.stop - _TEXT.start
    return text.encode()[:nbytes].ljust(nbytes, b"\0")


def _is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped by a signal or a debugger, if the system tells (proc(5))."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The second field is the program's name in parentheses, which may hold anything.
    return told.rpartition(")")[2].split()[:1] in (["T"], ["t"])
