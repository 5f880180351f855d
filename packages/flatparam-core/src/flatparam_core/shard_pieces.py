"""A tensor as long as a shard, cut into the fragments of all parameters at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import torch
from typing_extensions import Self, final

from flatparam_core.layout import FlatLayout

__all__ = ["ShardPieces"]

Shape: TypeAlias = "tuple[int, ...]"


@final
@attrs.define(eq=False)
class ShardPieces:
    """How a rank's shard is cut: made once, and then one call makes the views of all parameters."""

    shapes: tuple[Shape, ...]
    """Of the fragment of each parameter: its elements lie along the first dimension, and the parameter's other
    dimensions are there, of length 1. So an optimizer's rule that asks for the number of dimensions decides as on the
    full parameter."""
    _cut: tuple[Shape, ...]
    """The shapes of all that lies in the shard, padding too."""
    _filled: tuple[int, ...]
    """Where each parameter stands among them; -1 for one of which the rank owns nothing."""
    _lengths: tuple[int, ...]
    """Of the fragments, and of the padding between them."""
    _places: tuple[int, ...]
    """Where each parameter stands among these."""
    _templates: list[torch.Tensor] | None = None
    """For each of `_cut` a tensor of that shape, without memory of its own."""

    @classmethod
    def of(cls, layout: FlatLayout, rank: int) -> Self:
        """How the shard of `rank` is cut."""
        return cls(*_plan(layout, rank))  # type: ignore[arg-type]  # in the order of the attributes

    def views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The fragment of every parameter, in slot order, as a view of `shard` (1-D, of the layout's shard length)."""
        if self._templates is None:
            one = torch.empty(())
            known = {shape: one.expand(shape) for shape in {*self._cut}}
            self._templates = [known[shape] for shape in self._cut]
        cut = torch._C._nn.unflatten_dense_tensors(shard, self._templates)
        if -1 not in self._filled:
            return [cut[at] for at in self._filled]
        empty = {shape: shard[:0].view(shape) for shape in {*self.shapes} if not shape[0]}
        return [
            empty[shape] if at < 0 else cut[at] for at, shape in zip(self._filled, self.shapes, strict=True)
        ]

    def lines(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same, each 1-D."""
        cut = shard.split_with_sizes(self._lengths)
        return [cut[at] for at in self._places]


@functools.lru_cache(maxsize=256)
def _plan(layout: FlatLayout, rank: int) -> tuple[tuple[Any, ...], ...]:
    """What `ShardPieces` begins with."""
    shapes: list[Shape] = []
    cut: list[Shape] = []
    filled: list[int] = []
    lengths: list[int] = []
    places: list[int] = []
    end = 0
    for slot, fragment in zip(layout.slots, layout.fragments(rank), strict=True):
        span = fragment.in_shard
        shapes.append((span.numel, *(1,) * (len(slot.spec.shape) - 1)))
        if span.start > end:
            cut.append((span.start - end,))
            lengths.append(span.start - end)
        filled.append(len(cut) if span else -1)
        places.append(len(lengths))
        lengths.append(span.numel)
        if span:
            cut.append(shapes[-1])
            end = span.stop
    if end < layout.shard_numel:
        cut.append((layout.shard_numel - end,))
        lengths.append(layout.shard_numel - end)
    return tuple(shapes), tuple(cut), tuple(filled), tuple(lengths), tuple(places)
