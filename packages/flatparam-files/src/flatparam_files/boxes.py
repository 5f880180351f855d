"""The boxes of an interval of a tensor's elements, by the name that this package has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatparam_core import Box, Span

__all__ = ["Box", "row_major_boxes"]


def row_major_boxes(shape: Sequence[int], span: Span) -> Iterator[Box]:
    """The boxes that tile the row-major elements `span` of a tensor of `shape`, in order; at most `2 * ndim - 1`."""
    return span.boxes(shape)
