"""A flat tensor whose memory comes and goes while the tensor, and every view of it, stays."""

from __future__ import annotations

from typing import final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.geometry.layout import FlatLayout
from flatparam_core.storage.pool import BufferPool

__all__ = ["FlatBuffer"]


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
    _storage: torch.UntypedStorage = attrs.field(init=False)
    _source: BufferPool | None = attrs.field(init=False, default=None)
    """The pool that its current memory came from."""
    _gaps: list[torch.Tensor] | None = attrs.field(init=False, default=None)

    @_storage.default
    def _storage_of_tensor(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @classmethod
    def create(
        cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, pool: BufferPool | None = None
    ) -> Self:
        """A buffer for the unsharded `layout`, without memory at first."""
        tensor = torch.empty(layout.numel, dtype=dtype, device=device)
        buffer = cls(layout, tensor, layout.numel * dtype.itemsize, pool)
        buffer.free()
        return buffer

    @classmethod
    def over(cls, layout: FlatLayout, values: torch.Tensor) -> Self:
        """A buffer in the memory of `values`, 1-D, `layout.numel` elements, which is never freed."""
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
            self.tensor = self.tensor.new_empty(self.layout.numel)
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
            self._source.free(self._storage)
            self._source = None

    def shard(self, rank: int) -> torch.Tensor:
        """The slice of `rank` in the allocated buffer, 1-D, `layout.shard_numel` elements, a view."""
        return self.tensor[self.layout.shard_span(rank).as_slice()]

    def view(self, index: int) -> torch.Tensor:
        """Parameter `index` in its shape and memory order, as a view with a version counter of its own.

        Make the view while the buffer is allocated; it then outlives every free and allocate. Writing the whole buffer
        does not count as an in-place change of the view, so autograd accepts it if the bytes come back as they were.
        """
        slot = self.layout.slots[index]
        return self.tensor.data.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start)

    def views(self) -> tuple[torch.Tensor, ...]:
        """All parameters, in the order of the slots; see `view`."""
        return tuple(self.view(index) for index in range(len(self.layout.slots)))

    def zero_gaps(self) -> None:
        """Write zeros to the padding, so that nothing undefined is ever reduced."""
        if self._gaps is None:
            self._gaps = [self.tensor[gap.as_slice()] for gap in self.layout.gaps]
        if self._gaps:
            torch._foreach_zero_(self._gaps)
