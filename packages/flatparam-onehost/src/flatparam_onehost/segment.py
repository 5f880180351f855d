"""The memory that the ranks of one host share: one file without a name, mapped by all of them.

The first rank makes the file (`memfd_create`), the others open it through `/proc`. It is in no file system, so it is
gone when the last process that maps it has ended, in whatever way. The file is sparse: it begins with a few control
words, and each slot begins at a multiple of `SLOT_SPAN`, so that a slot grows without moving another; only pages that
were written to take memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Threshold
from flatparam_comm.hosts import make_sealed_memory

#: The number of collectives that may be under way between the fastest rank and the slowest.
SLOTS: Final = 2
SLOT_SPAN: Final = 1 << 40
_WORD: Final = 8
_WORDS_IN_LINE: Final = 8
LEAST_MAPPED: Final = Threshold(
    "comm.least_mapped_nbytes",
    1 << 16,
    "At least this much of a slot of shared memory is mapped; for larger messages it is mapped anew, in powers of two.",
    most=1 << 20,
)


def round_to_pages(nbytes: int) -> int:
    """Return the number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@final
class SharedSegment:
    """One process's view of the memory that a group shares.

    Each control word is an aligned 64-bit integer that only one rank writes: for each slot, each rank's call and its
    number in `posted`, and the number of the last call that it is done with in `consumed`; and whether it has `failed`.
    """

    __slots__ = ("__weakref__", "_close", "failed", "fd", "slots", "token")

    def __init__(self, fd: int, size: int) -> None:
        """Map the segment of a group of `size` ranks; the descriptor belongs to this object from now on."""
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        words = memoryview(mmap.mmap(fd, round_to_pages(_control_nbytes(size)))).cast("q")
        self.token = words[:2]
        self.failed = words[_WORDS_IN_LINE : _WORDS_IN_LINE + size]
        start, step = _WORDS_IN_LINE + _line(size), _line(2 * size) + _line(size)
        self.slots = [
            MessageSlot(
                fd,
                (index + 1) * SLOT_SPAN,
                words[at : at + 2 * size],
                words[at + _line(2 * size) : at + _line(2 * size) + size],
            )
            for index, at in enumerate(range(start, start + SLOTS * step, step))
        ]

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """Return a new segment for a group of `size` ranks, all zeros."""
        made = cls(make_sealed_memory("flatparam", (SLOTS + 1) * SLOT_SPAN), size)
        made.token[0], made.token[1] = (int.from_bytes(os.urandom(7), "little") for _ in range(2))
        return made

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> SharedSegment:
        """Return the segment that process `pid` has under the descriptor `fd`."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), size)

    @property
    def held_nbytes(self) -> int:
        """The bytes of memory that it takes, for all ranks together: whole pages of control words and of each slot."""
        control = round_to_pages(_control_nbytes(len(self.failed)))
        return control + sum(round_to_pages(slot.used) for slot in self.slots)

    def close(self) -> None:
        """Release it. The memory is freed when every process has released it; a mapping ends when nothing uses it."""
        self.slots = []
        self.token = self.failed = memoryview(bytes(_WORD * len(self.failed))).cast("q")
        self._close()


@final
@attrs.define(eq=False)
class MessageSlot:
    """The memory of every `SLOTS`-th collective: control words, and bytes that grow with the messages."""

    fd: int
    offset: int
    posted: memoryview
    consumed: memoryview
    used: int = 0
    stamps: memoryview = attrs.field(init=False)
    calls: memoryview = attrs.field(init=False)
    memory: Tensor = attrs.field(init=False, factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))

    def __attrs_post_init__(self) -> None:
        self.calls, self.stamps = self.posted[0::2], self.posted[1::2]

    def reserve(self, nbytes: int) -> bool:
        """Map at least `nbytes`; returns whether `memory` is a different tensor now."""
        self.used = max(self.used, nbytes)
        if nbytes <= self.memory.numel():
            return False
        mapped = max(LEAST_MAPPED.value, 1 << (nbytes - 1).bit_length())
        self.memory = torch.frombuffer(mmap.mmap(self.fd, mapped, offset=self.offset), dtype=torch.uint8)
        return True

    def view(self, dtype: torch.dtype, start: int, numel: int) -> Tensor:
        """Return the `numel` elements from number `start` on."""
        return self.memory[start * dtype.itemsize : (start + numel) * dtype.itemsize].view(dtype)


def _line(words: int) -> int:
    """Return the number of words, rounded up to whole cache lines."""
    return -(-words // _WORDS_IN_LINE) * _WORDS_IN_LINE


def _control_nbytes(size: int) -> int:
    return _WORD * (_WORDS_IN_LINE + _line(size) + SLOTS * (_line(2 * size) + _line(size)))
