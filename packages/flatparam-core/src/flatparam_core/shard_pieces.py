"""A tensor as long as a shard, cut into the fragments of all parameters at once."""

from __future__ import annotations

import attrs
import torch
from typing_extensions import Self, final

from flatparam_core.layout import FlatLayout

__all__ = ["ShardPieces"]


@final
@attrs.frozen(eq=False)
class ShardPieces:
    """How a rank's shard is cut: made once, and then one call makes the views of all parameters.

    A view's elements lie along its first dimension; the parameter's other dimensions are there, of length 1. So an
    optimizer's rule that asks for the number of dimensions decides as on the full parameter.
    """

    _templates: list[torch.Tensor]
    """What lies in the shard, padding too, as tensors of these shapes without memory of their own."""
    _filled: list[int]
    """Where each parameter stands among them; -1 for one of which the rank owns nothing."""
    _dims: list[int]

    @classmethod
    def of(cls, layout: FlatLayout, rank: int) -> Self:
        """How the shard of `rank` is cut."""
        one = torch.empty(())
        dims = [max(len(slot.spec.shape), 1) for slot in layout.slots]
        templates: list[torch.Tensor] = []
        filled = []
        end = 0
        for fragment, n in zip(layout.fragments(rank), dims, strict=True):
            span = fragment.in_shard
            if not span:
                filled.append(-1)
                continue
            if span.start > end:
                templates.append(one.expand(span.start - end))
            filled.append(len(templates))
            templates.append(one.expand(span.numel, *(1,) * (n - 1)))
            end = span.stop
        if end < layout.shard_numel:
            templates.append(one.expand(layout.shard_numel - end))
        return cls(templates, filled, dims)

    def views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The fragment of every parameter, in slot order, as a view of `shard` (1-D, of the layout's shard length)."""
        cut = torch._C._nn.unflatten_dense_tensors(shard, self._templates)
        empty = {n: shard[:0].view(0, *(1,) * (n - 1)) for n in {*self._dims}} if -1 in self._filled else {}
        return [empty[n] if at < 0 else cut[at] for at, n in zip(self._filled, self._dims, strict=True)]
