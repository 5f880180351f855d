"""Tensors in files that torch's functions put together or cut, before a byte of them is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_files import Box, TensorInfo
from flatparam_files.disk.source import read_boxes
from flatparam_files.formats.stored_tensors import Storage, Stored, StridedTensor, row_major
from flatparam_runtime import Span


@final
@attrs.frozen(eq=False)
class UnreadTensor:
    """A tensor in files that is not read. `torch.stack`, `cat`, `chunk` and `split` make others of it, not read either.

    So a function that was written for tensors says how the tensors of files become those of a model, and each rank
    still reads its own part. Other functions of torch raise a TypeError, and what does not fit a ValueError.
    """

    stored: Stored

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return torch.Size(self.stored.info.shape)

    @property
    def dtype(self) -> torch.dtype:
        """As of a tensor."""
        return self.stored.info.dtype

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> UnreadTensor:
        """As of a tensor: elements are read in row-major order."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take torch's call of `function` with tensors that are not read."""
        ours = _FUNCTIONS.get(function)
        return NotImplemented if ours is None else ours(*args, **(kwargs or {}))


@final
@attrs.frozen(eq=False)
class _JoinedTensor(Stored):
    """A tensor in boxes, each of which is a tensor in files of as many elements; only what is needed is read."""

    boxes: tuple[tuple[Box, Stored], ...]

    def read(self, span: Span) -> Iterator[Tensor]:
        """Read the elements `span` from the tensors that they lie in."""
        return read_boxes(self.info, span, self._read_box)

    def _read_box(self, wanted: Box, out: Tensor) -> None:
        """Read the elements of `wanted`, which follow each other in this tensor, and hence in each part of it."""
        for box, stored in self.boxes:
            common = wanted.overlap(box)
            if common.numel:
                inside = common.relative_to(box.offsets).offsets
                start = sum(i * stride for i, stride in zip(inside, row_major(box.sizes), strict=True))
                found = torch.cat(list(stored.read(Span(start, start + common.numel))))
                common.relative_to(wanted.offsets).of(out).copy_(found.view(common.sizes))

    def storages(self) -> Iterator[Storage]:
        """Yield the parts of files of all its tensors."""
        return (storage for _, stored in self.boxes for storage in stored.storages())


def _stack(tensors: Sequence[UnreadTensor], dim: int = 0) -> UnreadTensor:
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) != 1:
        raise ValueError(f"expected tensors of one shape, found {shapes}")
    at = _dimension(dim, len(shapes[0]) + 1)
    return _joined([_with_dimension(tensor, at) for tensor in tensors], at)


def _cat(tensors: Sequence[UnreadTensor], dim: int = 0) -> UnreadTensor:
    at = _dimension(dim, len(tensors[0].shape))
    shapes = sorted({(*tensor.shape[:at], *tensor.shape[at + 1 :]) for tensor in tensors})
    if len(shapes) != 1 or len({len(tensor.shape) for tensor in tensors}) != 1:
        raise ValueError(f"expected tensors that differ in dimension {at} only, found {shapes}")
    return _joined([_boxes_of(tensor) for tensor in tensors], at)


_Boxes = tuple[TensorInfo, tuple[tuple[Box, Stored], ...]]


def _boxes_of(tensor: UnreadTensor) -> _Boxes:
    stored, info = tensor.stored, tensor.stored.info
    if isinstance(stored, _JoinedTensor):
        return info, stored.boxes
    return info, ((Box((0,) * len(info.shape), info.shape), stored),)


def _with_dimension(tensor: UnreadTensor, at: int) -> _Boxes:
    """Return the boxes of a tensor that has one dimension more, of size 1."""
    info, boxes = _boxes_of(tensor)
    return (
        TensorInfo((*info.shape[:at], 1, *info.shape[at:]), info.dtype),
        tuple(
            (Box((*box.offsets[:at], 0, *box.offsets[at:]), (*box.sizes[:at], 1, *box.sizes[at:])), stored)
            for box, stored in boxes
        ),
    )


def _joined(parts: Sequence[_Boxes], at: int) -> UnreadTensor:
    """One tensor of several, one behind the other in dimension `at`."""
    dtypes = sorted({str(info.dtype) for info, _ in parts})
    if len(dtypes) != 1:
        raise ValueError(f"expected tensors of one dtype, found {', '.join(dtypes)}")
    moved, start = [], 0
    for info, boxes in parts:
        for box, stored in boxes:
            offsets = (*box.offsets[:at], box.offsets[at] + start, *box.offsets[at + 1 :])
            moved.append((Box(offsets, box.sizes), stored))
        start += info.shape[at]
    first = parts[0][0]
    shape = (*first.shape[:at], start, *first.shape[at + 1 :])
    return UnreadTensor(_JoinedTensor(TensorInfo(shape, first.dtype), tuple(moved)))


def _chunk(tensor: UnreadTensor, chunks: int, dim: int = 0) -> tuple[UnreadTensor, ...]:
    size = tensor.shape[_dimension(dim, len(tensor.shape))]
    return _split(tensor, math.ceil(size / chunks) or 1, dim)


def _split(tensor: UnreadTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[UnreadTensor, ...]:
    stored, shape, at = tensor.stored, tensor.shape, _dimension(dim, len(tensor.shape))
    if not isinstance(stored, StridedTensor):
        raise TypeError(f"a {type(stored).__name__} is not cut before it is read")
    if isinstance(sizes, int):
        full, rest = divmod(shape[at], sizes)
        sizes = [sizes] * full + [rest] * bool(rest)
    if sum(sizes) != shape[at]:
        raise ValueError(f"expected sizes of {shape[at]} together, found {list(sizes)}")
    made, start = [], 0
    for size in sizes:
        info = TensorInfo((*shape[:at], size, *shape[at + 1 :]), tensor.dtype)
        offset = stored.offset + start * stored.strides[at]
        made.append(UnreadTensor(attrs.evolve(stored, info=info, offset=offset)))
        start += size
    return tuple(made)


def _dimension(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"expected a dimension of {ndim}, found {dim}")
    return dim % ndim


_FUNCTIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
}
