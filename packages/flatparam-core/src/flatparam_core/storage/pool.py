"""A pool that keeps the memory of freed flat buffers for the next ones."""

from __future__ import annotations

from typing import final

import attrs
import torch

__all__ = ["BufferPool"]

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this torch can hand memory from one storage to another; if not, nothing is kept."""


@final
@attrs.define(eq=False)
class BufferPool:
    """Keeps the memory of freed flat buffers on the CPU for the next buffer of the same size.

    The C allocator gives large blocks back to the system, which clears their pages again at the next allocation: that
    takes as long as copying them. On an accelerator torch's own allocator does this already.

    One block of each size is kept, since what is freed makes room for what is allocated next. Invariant:
    `in_use + kept <= peak`, so there is never more memory than without the pool at its worst moment.
    """

    in_use: int = 0
    """Bytes of the buffers that were allocated here and not freed yet."""
    kept: int = 0
    """Bytes that wait for the next buffer."""
    peak: int = 0
    """The most bytes in use at once since the pool was last cleared or trimmed."""
    peak_of_pass: int = 0
    """The most bytes in use at once between the last two times that the pool was cleared."""
    _peak_before: int = 0
    """The most bytes in use at once since the pool was cleared, until it was trimmed."""
    keeps: bool = True
    """Whether freed memory is kept."""
    hits: int = 0
    """The number of buffers that were given kept memory."""
    _blocks: dict[int, list[torch.UntypedStorage]] = attrs.field(factory=dict)
    _spare: list[torch.UntypedStorage] = attrs.field(factory=list)
    """Storages without bytes, to swap with."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give the empty `storage` `nbytes` bytes, uninitialised."""
        blocks = self._blocks.get(nbytes)
        if blocks:
            block = blocks.pop()
            storage._swap_data_ptr_(block)  # type: ignore[attr-defined]  # it has no public name
            self._spare.append(block)
            self.in_use += nbytes
            self.kept -= nbytes
            self.hits += 1
            return
        self.make_room(nbytes)
        storage.resize_(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Count `nbytes` bytes that are about to be allocated as in use, and keep less if the sum exceeds the peak."""
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        while self.in_use + self.kept > self.peak:
            size = next(size for size, blocks in self._blocks.items() if blocks)
            self._blocks[size].pop()
            self.kept -= size

    def free(self, storage: torch.UntypedStorage) -> None:
        """Take back the bytes of `storage`, which were allocated here."""
        nbytes = storage.nbytes()
        self.in_use -= nbytes
        if not (_CAN_SWAP and self.keeps) or self._blocks.get(nbytes):
            storage.resize_(0)
            return
        block = self._spare.pop() if self._spare else torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        block._swap_data_ptr_(storage)  # type: ignore[attr-defined]  # it has no public name
        self._blocks.setdefault(nbytes, []).append(block)
        self.kept += nbytes

    def give_away(self, nbytes: int) -> None:
        """Count `nbytes` bytes of a buffer, which were in use, as given away."""
        self.in_use -= nbytes

    def trim(self) -> None:
        """Give the kept memory back to the system: less will be in use from now on."""
        self._peak_before = max(self._peak_before, self.peak)
        self._blocks.clear()
        self.kept, self.peak = 0, self.in_use

    def clear(self) -> None:
        """Trim the pool, between two passes."""
        self.trim()
        self._peak_before, self.peak_of_pass = 0, self._peak_before
