"""A flat tensor that is never made: its parts stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs
import torch

from flatparam_core.geometry.layout import FlatLayout
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import memory_view


@final
@attrs.frozen(eq=False)
class Unflattened:
    """The contents of a flat tensor: a tensor for each parameter, and zeros elsewhere.

    `fill` copies a stretch of the flat tensor from the parts, so that each element is copied once, to where it is
    needed.
    """

    layout: FlatLayout
    dtype: torch.dtype
    """The dtype of the flat tensor; a part of a different dtype is cast."""
    device: torch.device
    parts: Mapping[int, torch.Tensor]
    """The parts by slot, each in the shape of its parameter; a slot without a part is zero."""

    def numel(self) -> int:
        """Return the number of elements of the flat tensor."""
        return self.layout.numel

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Write the elements `[start, start + out.numel())` of the flat tensor to `out`, 1-D and contiguous."""
        stretch = Span(start, start + out.numel())
        if not stretch:
            return
        places, whole = [], []
        empty = [*self.layout.gaps]
        for index, slot in enumerate(self.layout.slots):
            common = slot.span.overlap(stretch)
            part = self.parts.get(index)
            if not common:
                continue
            if part is None:
                empty.append(common)
            elif common == slot.span:
                at = out.storage_offset() + common.start - start
                places.append(out.as_strided(slot.spec.shape, slot.spec.stride, at))
                whole.append(part)
            else:
                cut = memory_view(part, slot.spec)[common.relative_to(slot.span.start).as_slice()]
                out[common.relative_to(start).as_slice()].copy_(cut)
        with torch.no_grad():
            # torch refuses an empty list.
            if whole:
                torch._foreach_copy_(places, whole)
        for gap in empty:
            common = gap.overlap(stretch)
            if common:
                out[common.relative_to(start).as_slice()].zero_()
