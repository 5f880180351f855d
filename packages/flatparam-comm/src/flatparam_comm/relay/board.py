"""The positions of the ranks of one host, in memory that each of them writes and the others read.

A rank that issues a collective first writes down its number and what it is, and then reads what its peers wrote under
this number. If ranks diverge, the last of them to arrive sees it, and does not issue its collective: gloo would end
the process when it receives a message that is longer than expected.

Each process has one file without a name (`memfd_create`), with a page for each of its groups. The others map it through
`/proc`, and keep it when the process has died, so that its last collective can be told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable
from typing import Final, final
from zlib import crc32

import attrs
import torch

from flatparam_comm.checks import Site
from flatparam_comm.errors import describe_call
from flatparam_comm.relay.host import host_identity, is_stopped

__all__ = ["Board", "Offer", "Page", "Position", "code_of"]

#: The groups of a process that have a page; later ones go without. Pages that nobody writes take no memory.
_PAGES: Final = 1024
_PAGE_NBYTES: Final = 4096
#: Collectives that a page remembers. A rank that is further ahead of another one is not compared with it.
_REMEMBERED: Final = 128
#: Words of 8 bytes: the group's name, then two for each remembered collective.
_WORDS: Final = 1 + 2 * _REMEMBERED
#: The bytes of a page that hold the last collective, as text.
_TEXT: Final = slice(_WORDS * 8, _WORDS * 8 + 256)
#: The late ranks that a message describes.
_TOLD: Final = 4
_OPS: Final = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "barrier", "subgroup")
_DTYPES: Final = (
    None,
    *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str),
)
_OP_CODES: Final = {op: number << 24 for number, op in enumerate(_OPS)}
_DTYPE_CODES: Final = {dtype: number << 16 for number, dtype in enumerate(_DTYPES)}


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
        return f"{self.op} of {self.numel} x {str(self.dtype).removeprefix('torch.')}{detail}"


@final
@attrs.frozen
class Offer:
    """The facts by which a process on the same host finds the memory of another one."""

    host: tuple[str, ...]
    pid: int
    fd: int


def code_of(op: str, dtype: torch.dtype | None, detail: int) -> int:
    """A position without its number of elements, in 31 bits."""
    return _OP_CODES[op] | _DTYPE_CODES[dtype] | (detail & 0xFFFF)


@final
class Board:
    """The memory of this process, and those of the others that were found."""

    __slots__ = ("_peers", "_pids", "_words", "fd")

    def __init__(self) -> None:
        """Make this process's memory; raises OSError or AttributeError if the system has no such memory."""
        self.fd = os.memfd_create("flatparam positions", os.MFD_CLOEXEC)
        os.truncate(self.fd, _PAGES * _PAGE_NBYTES)
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
        """This process's page of the group `name`; None if there is none left."""
        key = crc32(name.encode()) + 1
        for words in _pages(self._words):
            if words[0] in (0, key):
                # A group of the same name may have been before it.
                words[:_WORDS] = memoryview(bytes(8 * _WORDS)).cast("q")
                words[0] = key
                return Page(self, key, words)
        return None

    def describe(self, rank: int) -> str:
        """The process of `rank`, and whether it is stopped."""
        pid = self._pids[rank]
        return f"process {pid}, which is stopped" if is_stopped(pid) else f"process {pid}"

    def find(self, rank: int, key: int) -> memoryview | None:
        """The page with this key of `rank`, as far as it is known by now."""
        theirs = self._peers.get(rank)
        return None if theirs is None else next((each for each in _pages(theirs) if each[0] == key), None)

    def close(self) -> None:
        """Close the descriptor; what others have mapped remains theirs."""
        os.close(self.fd)


@final
class Page:
    """The page of one group."""

    __slots__ = ("_board", "_fence", "_found", "_key", "_text", "_texts", "_words")

    def __init__(self, board: Board, key: int, words: memoryview) -> None:
        """Begin with the page that has this key."""
        self._board, self._key, self._words = board, key, words
        self._text = words.cast("B")[_TEXT]
        self._found: list[tuple[int, memoryview]] = []
        self._texts: dict[tuple[str, str], bytes] = {}
        self._fence = threading.Lock()

    def find(self, ranks: Iterable[int]) -> None:
        """Compare with these ranks of the world from now on, as far as their memory is known."""
        found = [(rank, self._board.find(rank, self._key)) for rank in ranks]
        self._found = [(rank, words) for rank, words in found if words is not None]

    def late(self, number: int) -> list[int]:
        """The ranks of this host that have not issued collective `number` of the group; numbered within the world."""
        return [rank for rank, words in self._found if max(words[1 : 1 + 2 * _REMEMBERED : 2]) >> 31 < number]

    def last_of(self, rank: int) -> str:
        """The last collective of `rank` of the world; empty if nobody knows."""
        theirs = dict(self._found).get(rank)
        return "" if theirs is None else bytes(theirs.cast("B")[_TEXT]).rstrip(b"\0").decode(errors="replace")

    def describe_late(self, number: int) -> str:
        """Which ranks have not issued collective `number`, and what they issued last; empty if there are none."""
        late = self.late(number)
        told = "; ".join(
            f"rank {rank} ({self._board.describe(rank)}), whose last collective was {self.last_of(rank) or 'none'}"
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


def _map(fd: int, *, writable: bool) -> memoryview:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return memoryview(mmap.mmap(fd, _PAGES * _PAGE_NBYTES, access=access)).cast("q")


def _pages(words: memoryview) -> Iterable[memoryview]:
    step = _PAGE_NBYTES // 8
    return (words[at : at + step] for at in range(0, len(words), step))


def _padded(text: str) -> bytes:
    """The text in exactly as many bytes as there are for it."""
    nbytes = _TEXT.stop - _TEXT.start
    return text.encode()[:nbytes].ljust(nbytes, b"\0")
