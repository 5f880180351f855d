"""What an interval of a parameter's elements looks like in its dimensions: a few boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import ParamSpec, Span

__all__ = ["Box", "boxes_of", "cut"]


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


def boxes_of(spec: ParamSpec, span: Span) -> tuple[Box, ...]:
    """The boxes that tile the elements `span` of a parameter, counted in its memory order, in that order.

    At most `2 * ndim - 1`: what is left of a row, whole rows, the beginning of a row, and so in each dimension.
    """
    order = _dims_by_stride(spec)
    shape = [spec.shape[dim] for dim in order]
    return tuple(
        Box(_permuted(order, offsets), _permuted(order, sizes))
        for offsets, sizes in _row_major(shape, span.start, span.stop)
    )


def cut(spec: ParamSpec, boxes: Sequence[Box], elements: torch.Tensor) -> list[torch.Tensor]:
    """The views of `elements` (1-D, those of the boxes, in memory order), one for each box, in its sizes."""
    order = _dims_by_stride(spec)
    inverse = _inverse(order)
    views = []
    start = 0
    for box in boxes:
        part = elements[start : start + box.numel]
        views.append(part.view([box.sizes[dim] for dim in order]).permute(inverse))
        start += box.numel
    return views


def _dims_by_stride(spec: ParamSpec) -> list[int]:
    """The dimensions from the slowest to the fastest in memory; row-major where that is one answer."""
    if not spec.memory_order:
        return list(range(len(spec.shape)))
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim] if spec.shape[dim] > 1 else 0)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permuted(order: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[place] for place in _inverse(order))


def _row_major(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head:
        end = tail if first == last else row
        yield from _within(first, _row_major(shape[1:], head, end))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if tail and first <= last:
        yield from _within(last, _row_major(shape[1:], 0, tail))


def _within(
    row: int, boxes: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes:
        yield (row, *offsets), (1, *sizes)
