"""Half-open integer intervals, and their boxes in a tensor's dimensions: the project's only interval arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import torch
from typing_extensions import Self

from flatparam_core.errors import LayoutError


@final
@attrs.frozen(order=True)
class Span:
    """The integers `start <= i < stop`; empty if `start == stop`. Units: elements."""

    start: int
    stop: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LayoutError(f"a span needs 0 <= start <= stop, found [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        """The number of integers in the span."""
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def overlap(self, other: Span) -> Span:
        """Return the part common to both, in the coordinates of both; empty if they do not meet."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def relative_to(self, origin: int) -> Self:
        """Return the same integers counted from `origin` (which must not lie behind `start`)."""
        return type(self)(self.start - origin, self.stop - origin)

    def shifted(self, offset: int) -> Self:
        """Return the span moved `offset` to the right."""
        return type(self)(self.start + offset, self.stop + offset)

    def contains(self, other: Span) -> bool:
        """Return whether every integer of `other` lies in this span (an empty one must lie within the ends)."""
        return self.start <= other.start and other.stop <= self.stop

    def as_slice(self) -> slice:
        """Return the span as an index for a 1-D tensor."""
        return slice(self.start, self.stop)

    def boxes(self, shape: Sequence[int], within: tuple[int, ...] = ()) -> Iterator[Box]:
        """Yield the boxes that tile these row-major elements of a tensor of `shape`, in order; at most `2 * ndim - 1`.

        They are boxes of the tensor in which the indices `within`, of its first dimensions, choose that tensor.
        """
        ones = (1,) * len(within)
        if self and not shape:
            yield Box(within, ones)
        if not self or not shape:
            return
        row, inner = math.prod(shape[1:]), shape[1:]
        (first, head), (last, tail) = divmod(self.start, row), divmod(self.stop, row)
        if head:
            yield from Span(head, tail if first == last else row).boxes(inner, (*within, first))
            first += 1
        if first < last:
            yield Box((*within, first, *(0 for _ in inner)), (*ones, last - first, *inner))
        if tail and first <= last:
            yield from Span(0, tail).boxes(inner, (*within, last))


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
        """Return the elements in `tensor`, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def overlap(self, other: Box) -> Box:
        """Return the elements common to both; an empty box if they do not meet."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        return Box(offsets, tuple(max(0, stop - start) for start, stop in zip(offsets, stops, strict=True)))

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the same elements, counted from the element `origin` on."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def _stops(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
