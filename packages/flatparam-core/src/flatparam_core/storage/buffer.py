"""A flat tensor whose memory comes and goes while the tensor, and every view of it, stays; and the pool of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.geometry import FlatLayout, Slot

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this torch can hand memory from one storage to another; if not, nothing is kept."""


@final
@attrs.define(eq=False)
class BufferPool:
    """Keeps the memory of freed flat buffers on the CPU for the next buffer of the same size.

    The C allocator gives large blocks back to the system, which clears their pages again at the next allocation: that
    takes as long as copying them. On an accelerator torch's own allocator does this already.

    One block of each size is kept, since what is freed makes room for what is allocated next: two of those that are
    allocated in pairs. Invariant:
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

    def free(self, storage: torch.UntypedStorage, most: int = 1) -> None:
        """Take back the bytes of `storage`, which were allocated here; keep them if fewer than `most` are kept."""
        nbytes = storage.nbytes()
        self.in_use -= nbytes
        if not (_CAN_SWAP and self.keeps) or len(self._blocks.get(nbytes, ())) >= most:
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


@final
@attrs.define(eq=False)
class FlatBuffer:
    """A 1-D tensor of `layout.numel` elements that is allocated and freed by resizing its storage.

    Autograd's saved tensors alias that storage, so what was saved in the forward pass is valid again in the backward
    pass once the storage is allocated and filled again. While the storage is free, nothing may read a view of it.
    """

    layout: FlatLayout
    tensor: torch.Tensor
    """The whole buffer; `tensor.data` aliases share its storage but not its version counter."""
    nbytes: int
    """Bytes that the buffer takes while it is allocated."""
    pool: BufferPool | None = None
    """The pool that its memory comes from and returns to; without one, or on an accelerator, torch allocates."""
    is_borrowed: bool = False
    """Whether the memory belongs to somebody else, and is always there."""
    _storage: torch.UntypedStorage = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.tensor.untyped_storage(), takes_self=True)
    )
    _source: BufferPool | None = attrs.field(init=False, default=None)
    """The pool that its current memory came from."""
    _gaps: list[torch.Tensor] | None = attrs.field(init=False, default=None)

    @classmethod
    def create(
        cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, pool: BufferPool | None = None
    ) -> Self:
        """Return a buffer for the unsharded `layout`, without memory at first."""
        buffer = cls(layout, _empty(layout.numel, dtype, device), layout.numel * dtype.itemsize, pool)
        buffer.free()
        return buffer

    @classmethod
    def over(cls, layout: FlatLayout, values: torch.Tensor) -> Self:
        """Return a buffer in the memory of `values`, 1-D, `layout.numel` elements, which is never freed."""
        return cls(layout, values.data, layout.numel * values.dtype.itemsize, is_borrowed=True)

    def borrow(self, values: torch.Tensor) -> bool:
        """Use the memory of `values` (same shape and dtype) from now on; return false if the buffer does already."""
        if self.tensor.data_ptr() == values.data_ptr():
            return False
        self.tensor = values.data
        self._storage = self.tensor.untyped_storage()
        return True

    def give_away(self) -> torch.Tensor:
        """Return the tensor and its memory, both the caller's from now on; the next allocation makes new ones.

        Views that were made before stay with the memory.
        """
        given = self.tensor
        if self._source is not None:
            self._source.give_away(self.nbytes)
            self._source = None
        self.tensor = given.new_empty(0)
        self._storage = self.tensor.untyped_storage()
        self._gaps = None
        return given

    def leave(self) -> None:
        """Leave the memory to whoever else has it, and have other memory of the same size, which no view is in yet."""
        like = self.give_away()
        self.tensor = _empty(self.layout.numel, like.dtype, like.device)
        self._storage = self.tensor.untyped_storage()

    @property
    def is_resizable(self) -> bool:
        """Whether the memory can be freed: not if `Tensor.numpy()` or `Tensor.share_memory_()` has given it out."""
        return self._storage.resizable() and not (self.tensor.is_cpu and self._storage.is_shared())

    @property
    def holders(self) -> int:
        """The number of references to the memory: of this buffer, of its views, and of what was made of them."""
        return torch._C._storage_Use_Count(self._storage._cdata)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the memory of this buffer: it is a view, or an alias such as `.detach()` makes."""
        try:
            return bool(tensor.untyped_storage()._cdata == self._storage._cdata)
        except (RuntimeError, NotImplementedError):
            # It stands for others, as in a transform, or has no memory.
            return False

    @property
    def is_allocated(self) -> bool:
        """Whether there are bytes behind the views."""
        return self._storage.nbytes() > 0 or self.nbytes == 0

    @property
    def held_nbytes(self) -> int:
        """The bytes of its own that the buffer has now."""
        return 0 if self.is_borrowed else self._storage.nbytes()

    def allocate(self) -> None:
        """Give the tensor its bytes, uninitialised; do nothing if it has them."""
        if self._storage.nbytes() == self.nbytes or self.is_borrowed:
            return
        self._source = self.pool if self.tensor.is_cpu else None
        # A tensor that was given away is replaced by a new one.
        if self.tensor.numel() != self.layout.numel:
            if self._source is not None:
                self._source.make_room(self.nbytes)
            self.tensor = _empty(self.layout.numel, self.tensor.dtype, self.tensor.device)
            self._storage = self.tensor.untyped_storage()
        elif self._source is None:
            self._storage.resize_(self.nbytes)
        else:
            self._source.allocate(self._storage, self.nbytes)

    def free(self) -> None:
        """Free the bytes; the tensor and its views keep their shapes."""
        if not self._storage.nbytes() or self.is_borrowed:
            return
        if self._source is None:
            self._storage.resize_(0)
        else:
            # Chunks are gathered in a buffer of the same size.
            self._source.free(self._storage, 2 if self.layout.is_chunked else 1)
            self._source = None

    def shard(self, rank: int) -> torch.Tensor:
        """Return the shard of `rank` in the allocated buffer, 1-D, `layout.shard_numel` elements: a view, or chunks."""
        return self.layout.shard_of(self.tensor, rank)

    def view(self, index: int) -> torch.Tensor:
        """Parameter `index` in its shape and memory order, as a view with a version counter of its own.

        Make the view while the buffer is allocated; it then outlives every free and allocate. Writing the whole buffer
        does not count as an in-place change of the view, so autograd accepts it if the bytes come back as they were.
        """
        return slot_view(self.tensor.data, self.layout.slots[index])

    def views(self) -> tuple[torch.Tensor, ...]:
        """Return all parameters, in the order of the slots; see `view`."""
        return tuple(self.view(index) for index in range(len(self.layout.slots)))

    def gaps(self) -> Sequence[torch.Tensor]:
        """Return the padding, as 1-D views; it has to be zero wherever a buffer is reduced."""
        if self._gaps is None:
            self._gaps = [self.tensor[gap.as_slice()] for gap in self.layout.gaps]
        return self._gaps


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # A tensor that is made in inference mode may not be written in place outside of it.
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)


def slot_view(whole: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The parameter of `slot` in `whole`, a buffer or an alias of it, with which the view shares a version counter."""
    return whole.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start)
