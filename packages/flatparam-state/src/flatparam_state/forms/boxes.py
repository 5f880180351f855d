"""The boxes of a parameter's elements in its memory order, and the views of these elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatparam_runtime import Box, ParamSpec, Span

__all__ = ["boxes_of", "cut"]


def boxes_of(spec: ParamSpec, span: Span) -> tuple[Box, ...]:
    """Return the boxes that tile the elements `span` of a parameter, counted in its memory order, in that order.

    At most `2 * ndim - 1`: what is left of a row, whole rows, the beginning of a row, and so in each dimension.
    """
    order = _dims_by_stride(spec)
    shape = [spec.shape[dim] for dim in order]
    return tuple(Box(_permuted(order, box.offsets), _permuted(order, box.sizes)) for box in span.boxes(shape))


def cut(spec: ParamSpec, boxes: Sequence[Box], elements: torch.Tensor) -> list[torch.Tensor]:
    """Return the views of `elements` (1-D, those of the boxes, in memory order), one for each box, in its sizes."""
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
    """Return the dimensions from the slowest to the fastest in memory; row-major if that is one answer."""
    if not spec.memory_order:
        return list(range(len(spec.shape)))
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim] if spec.shape[dim] > 1 else 0)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permuted(order: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[place] for place in _inverse(order))
