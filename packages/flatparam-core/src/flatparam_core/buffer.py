"""A flat tensor whose memory comes and goes while the tensor, and every view of it, stays."""

from __future__ import annotations

import attrs
import torch
from typing_extensions import Self, final

from flatparam_core.layout import FlatLayout

__all__ = ["FlatBuffer"]


@final
@attrs.define(eq=False)
class FlatBuffer:
    """A 1-D tensor of `layout.numel` elements that is allocated and freed by resizing its storage.

    Autograd's saved tensors alias that storage, so what was saved in the forward pass is right again in the backward
    pass once the storage is allocated and filled again. While it is free, nothing may read a view of it.
    """

    layout: FlatLayout
    tensor: torch.Tensor
    """The whole buffer; `tensor.data` aliases share its storage but not its version counter."""

    @classmethod
    def create(cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device) -> Self:
        """A buffer for the unsharded `layout`, free at first."""
        buffer = cls(layout, torch.empty(layout.numel, dtype=dtype, device=device))
        buffer.free()
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer takes while it is allocated."""
        return self.layout.numel * self.tensor.dtype.itemsize

    @property
    def is_allocated(self) -> bool:
        """Whether there are bytes behind the views."""
        return self.tensor.untyped_storage().size() > 0 or self.nbytes == 0

    def allocate(self) -> None:
        """Give the tensor its bytes, uninitialised; nothing happens where it has them."""
        storage = self.tensor.untyped_storage()
        if storage.size() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the bytes back; the tensor and its views keep their shapes."""
        storage = self.tensor.untyped_storage()
        if storage.size():
            storage.resize_(0)

    def shard(self, rank: int) -> torch.Tensor:
        """This rank's slice of the allocated buffer, 1-D, `layout.shard_numel` elements, a view."""
        return self.tensor[self.layout.shard_span(rank).as_slice()]

    def view(self, index: int) -> torch.Tensor:
        """Parameter `index` in its shape and memory order, as a view with a version counter of its own.

        Make it while the buffer is allocated; it then outlives every free and allocate. Writing the whole buffer does
        not count as an in-place change of the view, so autograd accepts it where the bytes come back as they were.
        """
        slot = self.layout.slots[index]
        return self.tensor.data.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start)

    def views(self) -> tuple[torch.Tensor, ...]:
        """All parameters, in the order of the slots; see `view`."""
        return tuple(self.view(index) for index in range(len(self.layout.slots)))

    def zero_gaps(self) -> None:
        """Write zeros to the padding, so that nothing undefined is ever reduced."""
        for gap in self.layout.gaps:
            self.tensor[gap.as_slice()].zero_()
