"""Addresses without memory behind them, blocks of memory, and the log of their births and deaths."""

from __future__ import annotations

import itertools
import mmap
import weakref
from array import array
from collections import defaultdict
from typing import Final, final

import attrs
import torch

from flatparam_plan.plan_error import PlanError

_ADDRESSES: Final = 2**43
"""The address space that is reserved, as far as the system allows."""
_ALIGNMENT: Final = 64


@final
class Block:
    """The life of memory that torch allocates: it ends with the storage that holds this object."""

    __slots__ = ("_address", "_log", "_unknown", "number")

    def __init__(self, log: Log, nbytes: int, unknown: set[int], address: int = 0) -> None:
        """Begin a life; `unknown` has the addresses of what is not known, from which this one is taken at the end."""
        self._log, self._unknown, self._address = log, unknown, address
        self.number = log.born(nbytes)

    def end(self) -> None:
        """Note the end of the block's life; what comes to its address is known again."""
        if self.number >= 0:
            self._log.died(self.number)
            self._unknown.discard(self._address)
            self.number = -1

    def __del__(self) -> None:
        # An interrupt may come before the last line of the constructor.
        if hasattr(self, "number"):
            self.end()


@final
class Arena:
    """Addresses that the system has promised no memory for."""

    def __init__(self, log: Log) -> None:
        """Reserve addresses; blocks are noted in `log`.

        Raises:
            PlanError: if the system reserves none.
        """
        self._log = log
        self._memory, self.size = _reserve()
        self._view = memoryview(self._memory)
        self.start = torch.frombuffer(self._view[:1], dtype=torch.uint8).data_ptr()
        self._next = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._alive: dict[int, tuple[weakref.ref[memoryview], int]] = {}

    def take(self, nbytes: int) -> memoryview:
        """Return a block of `nbytes` bytes, which returns when nobody refers to it."""
        length = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free.get(length)
        if free:
            offset = free.pop()
        else:
            offset, self._next = self._next, self._next + length
            if self._next > self.size:
                raise PlanError(
                    f"expected a program that takes at most {self.size:,} bytes of different addresses, found one "
                    "that takes more; plan fewer or smaller steps"
                )
        block = self._view[offset : offset + nbytes]
        number = self._log.born(nbytes)

        def returned(_: object) -> None:
            del self._alive[offset]
            free_now = self._free[length]
            free_now.append(offset)
            self._log.died(number)

        self._alive[offset] = (weakref.ref(block, returned), number)
        return block

    def close(self) -> bool:
        """Give the addresses back, unless some tensor still has one: then they go with the last of these.

        Returns whether they are given back.
        """
        try:
            self._view.release()
            self._memory.close()
        except BufferError:
            return False
        return True

    def number_at(self, address: int) -> int | None:
        """Return the number of the block that begins at an address."""
        found = self._alive.get(address - self.start)
        return None if found is None else found[1]


def _reserve() -> tuple[mmap.mmap, int]:
    """As many addresses as the system gives, without memory behind them."""
    size = _ADDRESSES
    flags = getattr(mmap, "MAP_PRIVATE", 2) | getattr(mmap, "MAP_ANONYMOUS", 0x20)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags | getattr(mmap, "MAP_NORESERVE", 0x4000)), size
        except (OSError, ValueError, OverflowError) as error:
            if size < 2**32:
                raise PlanError(
                    "expected a system that reserves addresses without memory (mmap with MAP_NORESERVE), found that it "
                    f"refuses: {error}; raise the limit of virtual memory (ulimit -v), or plan on a different machine"
                ) from error
            size //= 2


# The log of memory: every block's birth and death, in order


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
        """Return the most bytes in use between two places in the log."""
        before = self.sizes[start - 1] if start else 0
        return max(self.sizes[start:stop], default=before) if stop > start else before

    def place_of_peak(self, start: int, stop: int) -> int:
        """Return the place right after the first change between two places that reached the most bytes in use."""
        within = self.sizes[start:stop]
        return start + within.index(max(within)) + 1 if within else start

    def alive_at(self, place: int) -> dict[str, int]:
        """Return the bytes in use at a place of the log, by tag."""
        alive: dict[str, int] = defaultdict(int)
        for change in itertools.islice(self.changes, place):
            number = change if change >= 0 else ~change
            alive[self.tags[number]] += self.nbytes[number] if change >= 0 else -self.nbytes[number]
        return {tag: nbytes for tag, nbytes in alive.items() if nbytes}
