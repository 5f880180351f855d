"""Boxes: an interval of a tensor's elements, seen in the tensor's dimensions, is a few of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import torch

from flatparam_core import Span

__all__ = ["Box", "row_major_boxes"]


@final
@attrs.frozen
class Box:
    """The elements of an N-dimensional tensor with `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in `tensor`, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def overlap(self, other: Box) -> Box:
        """The elements common to both; an empty box if they do not meet."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        return Box(offsets, tuple(max(0, stop - start) for start, stop in zip(offsets, stops, strict=True)))

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same elements, counted from the element `origin` on."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def _stops(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def row_major_boxes(shape: Sequence[int], span: Span) -> Iterator[Box]:
    """The boxes that tile the row-major elements `span` of a tensor of `shape`, in order; at most `2 * ndim - 1`."""
    if not span:
        return
    if not shape:
        yield Box((), ())
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(span.start, row), divmod(span.stop, row)
    if head:
        yield from _within(first, row_major_boxes(inner, Span(head, tail if first == last else row)))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if tail and first <= last:
        yield from _within(last, row_major_boxes(inner, Span(0, tail)))


def _within(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in boxes)
