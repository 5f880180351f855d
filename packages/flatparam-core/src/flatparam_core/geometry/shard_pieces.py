"""The pieces that a shard has of parameters, and a flat tensor whose pieces stay where they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.geometry.layout import FlatLayout, Fragment
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import memory_view

Shape: TypeAlias = "tuple[int, ...]"


@final
@attrs.define(eq=False)
class ShardPieces:
    """The cut of a rank's shard: it is planned once, and then one call makes the views of all parameters."""

    shapes: tuple[Shape, ...]
    """The shape of each parameter's fragment; see `fragment_shape`."""
    _cut: tuple[Shape, ...]
    """The shapes of all pieces of the shard, padding included."""
    _lengths: tuple[int, ...]
    """The number of elements of each piece."""
    _filled: tuple[int, ...]
    """The index of each parameter's piece; -1 if the rank owns nothing of the parameter."""
    _templates: list[torch.Tensor] | None = None
    """A tensor of each shape of `_cut`, without memory of its own."""

    @classmethod
    def of(cls, layout: FlatLayout, rank: int) -> Self:
        """Return the cut of the shard of `rank`."""
        return cls(*_plan(layout, rank))  # type: ignore[arg-type]  # in the order of the attributes

    def views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The fragment of every parameter, in slot order, as a view of `shard` (1-D, of the layout's shard length)."""
        if self._templates is None:
            one = torch.empty((), device="cpu")
            known = {shape: one.expand(shape) for shape in {*self._cut}}
            self._templates = [known[shape] for shape in self._cut]
        cut = torch._C._nn.unflatten_dense_tensors(shard, self._templates)
        if -1 not in self._filled:
            return [cut[at] for at in self._filled]
        empty = {shape: shard[:0].view(shape) for shape in {*self.shapes} if not math.prod(shape)}
        return [empty[shape] if at < 0 else cut[at] for at, shape in zip(self._filled, self.shapes, strict=True)]

    def lines(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same fragments, each 1-D."""
        cut, nothing = shard.split_with_sizes(self._lengths), shard[:0]
        return [nothing if at < 0 else cut[at] for at in self._filled]


def fragment_shape(layout: FlatLayout, fragment: Fragment) -> Shape:
    """Return the shape of a rank's part of a parameter.

    A rule that keeps rows or the whole tensor together keeps the shape, too: rows of the parameter's own shape. Else
    the elements lie along the first dimension; the other dimensions have length 1, so that an optimizer's rule that
    depends on the number of dimensions (no weight decay below two) decides as for the full parameter. If nothing is
    sharded, the shape is the parameter's own. It never is if the parameter is 0-d or has rows without elements, or its
    elements are not in row-major order.
    """
    spec, numel = layout.slots[fragment.index].spec, fragment.in_shard.numel
    if spec.shape and spec.numel and spec.is_row_major:
        if layout.world_size == 1:
            return spec.shape
        if spec.rule.kind in ("row", "chunk", "whole"):
            return (numel * spec.shape[0] // spec.numel, *spec.shape[1:])
    if spec.shape[:1] == (0,) and spec.rule.kind in ("row", "chunk", "whole"):
        return spec.shape
    return (numel, *(1,) * (len(spec.shape) - 1))


@functools.lru_cache(maxsize=256)
def _plan(layout: FlatLayout, rank: int) -> tuple[tuple[Any, ...], ...]:
    """Return the first fields of `ShardPieces`."""
    shapes: list[Shape] = []
    cut: list[Shape] = []
    filled: list[int] = []
    end = 0
    for fragment in layout.fragments(rank):
        span = fragment.in_shard
        shapes.append(fragment_shape(layout, fragment))
        if not span:
            filled.append(-1)
            continue
        if span.start > end:
            cut.append((span.start - end,))
        filled.append(len(cut))
        cut.append(shapes[-1])
        end = span.stop
    left = layout.shard_span(rank).numel - end
    if left:
        cut.append((left,))
    return tuple(shapes), tuple(cut), tuple(map(math.prod, cut)), tuple(filled)


def pack_shard(tensors: Sequence[torch.Tensor], layout: FlatLayout, *, rank: int, device: torch.device) -> torch.Tensor:
    """Return this rank's shard of the flat parameter that `tensors` (one per slot) make up, 1-D; padding is zero.

    Only the rank's own part is copied: no flat buffer of the whole unit is made.
    """
    shard = torch.zeros(layout.shard_span(rank).numel, dtype=layout.dtype, device=device)
    for index, tensor in enumerate(tensors):
        pack_parameter(shard, layout, index, tensor, rank=rank)
    return shard


def pack_parameter(shard: torch.Tensor, layout: FlatLayout, index: int, tensor: torch.Tensor, *, rank: int) -> None:
    """Copy this rank's part of parameter `index`, whose full value is `tensor`, to its place in `shard`."""
    fragment = layout.fragments(rank)[index]
    if fragment.in_param:
        flat = memory_view(tensor, layout.slots[index].spec)
        shard[fragment.in_shard.as_slice()].copy_(flat[fragment.in_param.as_slice()])


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
