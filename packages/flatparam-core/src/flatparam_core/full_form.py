"""The full parameters of a flat parameter in one dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_core.buffer import FlatBuffer
from flatparam_core.layout import FlatLayout
from flatparam_core.pool import BufferPool

__all__ = ["FullForm"]


@final
@attrs.define(eq=False)
class FullForm:
    """The buffer of the full parameters, and one autograd leaf for each, a view of the buffer that is made once.

    A flat parameter has one in its compute dtype, and one in its own where that is another and was asked for.
    """

    buffer: FlatBuffer
    leaves: tuple[nn.Parameter, ...] = ()
    """Empty until the buffer was filled for the first time."""
    _solid: dict[int, nn.Parameter] = attrs.field(factory=dict)
    """The leaves that have elements, by index."""
    _offsets: list[int] = attrs.field(factory=list)
    """Where each of them lies in the buffer, in bytes."""
    watch: object | None = None
    """A runtime's own note about the leaves, from when its hooks are on them."""

    @classmethod
    def create(
        cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, pool: BufferPool | None = None
    ) -> Self:
        """A form without memory and without leaves."""
        return cls(FlatBuffer.create(layout, dtype=dtype, device=device, pool=pool))

    def make_leaves(self, attributes: Sequence[Mapping[str, object]], wanted: Sequence[bool]) -> None:
        """Make the leaves where there are none yet; the buffer is allocated.

        Args:
            attributes: for each parameter, what users and libraries noted on the original.
            wanted: for each parameter, whether it requires a gradient.
        """
        if self.leaves:
            return
        leaves = []
        with torch.inference_mode(False):  # or leaves made in inference mode could never be trained
            for view, noted, wants in zip(self.buffer.views(), attributes, wanted, strict=True):
                leaf = nn.Parameter(view, requires_grad=wants)
                vars(leaf).update(noted, _fsdp_flattened=True)
                leaves.append(leaf)
        self.leaves = tuple(leaves)
        start = self.buffer.tensor.data_ptr()
        self._solid = {index: leaf for index, leaf in enumerate(leaves) if leaf.numel()}
        self._offsets = [leaf.data_ptr() - start for leaf in self._solid.values()]

    def reclaim(self, *, keep: bool = False) -> list[int]:
        """Make views of the buffer, which is there, again of the leaves that somebody gave other memory (`.data =`).

        Args:
            keep: take the values that they were given over; else they are lost.

        Returns:
            The indices of these leaves.
        """
        start = self.buffer.tensor.data_ptr()
        if [*map(torch.Tensor.data_ptr, self._solid.values())] == [*map(start.__add__, self._offsets)]:
            return []
        places = zip(self._solid.items(), self._offsets, strict=True)
        moved = [index for (index, leaf), offset in places if leaf.data_ptr() != start + offset]
        for index in moved:
            leaf, view = self.leaves[index], self.buffer.view(index)
            if keep:
                view.copy_(leaf.detach())
            leaf.data = view
        return moved
