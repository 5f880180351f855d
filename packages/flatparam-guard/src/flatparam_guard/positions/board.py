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
from collections.abc import Iterable
from typing import Final, final

import attrs

from flatparam_comm.hosts import host_identity
from flatparam_comm.sealed_memory import make_sealed_memory
from flatparam_guard.network import is_stopped
from flatparam_guard.positions.page import PAGE_NBYTES, Page, key_of

__all__ = ["Board", "Offer"]

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
        """This process's page of the group `name`; None if there is none left."""
        key = key_of(name)
        for words in _pages(self._words):
            if words[0] in (0, key):
                return Page(key, words)
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


def _map(fd: int, *, writable: bool) -> memoryview:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return memoryview(mmap.mmap(fd, _PAGES * PAGE_NBYTES, access=access)).cast("q")


def _pages(words: memoryview) -> Iterable[memoryview]:
    step = PAGE_NBYTES // 8
    return (words[at : at + step] for at in range(0, len(words), step))
