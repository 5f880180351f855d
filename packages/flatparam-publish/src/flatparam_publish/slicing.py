"""The slices that the ranks of a tensor-parallel receiver have."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import final

import attrs
import torch
from torch import Tensor

from flatparam_files import TensorInfo
from flatparam_publish.catalogue import Catalogue, PublishedTensor
from flatparam_publish.publish_error import PublishError


@final
@attrs.frozen
class Part:
    """The part of a tensor that one receiver has: the indices `[start, stop)` of one dimension, seen in memory order.

    The tensor is `outer` times `extent` times `inner` elements, of which it has `outer` times `[start, stop)` times
    `inner`. It keeps their order, so elements that follow each other in the tensor follow each other in the part.
    """

    outer: int
    extent: int
    inner: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.stop - self.start == self.extent

    def before(self, position: int) -> int:
        """Return how many elements of the part lie before element `position` of the tensor."""
        rows, rest = divmod(position, max(1, self.extent * self.inner))
        width = (self.stop - self.start) * self.inner
        return rows * width + min(max(rest - self.start * self.inner, 0), width)

    def mask(self, positions: Tensor) -> Tensor:
        """Return which of the elements at `positions` (1-D, int64) of the tensor are in the part."""
        rest = positions % (self.extent * self.inner)
        return (rest >= self.start * self.inner) & (rest < self.stop * self.inner)

    def places(self, positions: Tensor) -> Tensor:
        """The positions in the part of the elements at `positions` of the tensor, all of which are in the part."""
        row = self.extent * self.inner
        rows = torch.div(positions, row, rounding_mode="floor")
        width = (self.stop - self.start) * self.inner
        return rows * width + positions - rows * row - self.start * self.inner


def _frozen(dims: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(dims))


@final
@attrs.frozen
class Slicing:
    """How a receiver of `size` tensor-parallel ranks cuts tensors: each rank has an equal part of one dimension.

    `dims` has the dimension by the receiver's name, or by a pattern with `*` as in file names; the first one that
    matches counts. A tensor that nothing matches is whole on every rank.
    """

    size: int = 1
    dims: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen)

    def __attrs_post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"Slicing: expected a number of ranks of at least 1, found {self.size!r}")

    def check(self, catalogue: Catalogue) -> None:
        """Check that every tensor can be cut.

        Raises:
            ValueError: naming the tensor, if a dimension does not exist, or is not a multiple of the ranks.
        """
        for tensor in catalogue.tensors:
            self.part(tensor, 0)

    def cuts(self, catalogue: Catalogue) -> tuple[int | None, ...]:
        """Return the dimension that is cut of each tensor, if one is."""
        return tuple(self._dim(tensor) for tensor in catalogue.tensors)

    def check_cuts(self, catalogue: Catalogue, theirs: Sequence[int | None]) -> None:
        """Check that the publisher cuts in the same way: as many elements of a different dimension would be others.

        Raises:
            PublishError: naming the first tensor that it does not.
        """
        for tensor, dim in zip(catalogue.tensors, theirs, strict=True):
            try:
                own = self._dim(tensor)
            except ValueError as error:
                raise PublishError(str(error)) from error
            if own != dim:
                raise PublishError(
                    f"the publisher {_cut(dim)} {tensor.name!r}, and the slicing of this receiver {_cut(own)} it; give "
                    "both the same Slicing"
                )

    def part(self, tensor: PublishedTensor, rank: int) -> Part:
        """Return the part of `tensor` that receiver `rank` has.

        Raises:
            ValueError: naming the tensor, if its dimension does not exist, or is not a multiple of the ranks.
        """
        dim = self._dim(tensor)
        if dim is None:
            return Part(1, 1, tensor.info.numel, 0, 1)
        shape = [tensor.info.shape[each] for each in tensor.dims]
        place = tensor.dims.index(dim)
        each = shape[place] // self.size
        inner = math.prod(shape[place + 1 :])
        return Part(math.prod(shape[:place]), shape[place], inner, rank * each, (rank + 1) * each)

    def _dim(self, tensor: PublishedTensor) -> int | None:
        """Return the dimension that is cut, if one is."""
        if self.size == 1:
            return None
        for pattern, dim in self.dims.items():
            if not fnmatch.fnmatchcase(tensor.name, pattern):
                continue
            shape = tensor.info.shape
            if not -len(shape) <= dim < len(shape):
                raise ValueError(
                    f"Slicing: {tensor.name!r} of shape {shape} has no dimension {dim}, which {pattern!r} cuts"
                )
            if shape[dim] % self.size:
                raise ValueError(
                    f"Slicing: {tensor.name!r} has {shape[dim]} indices in dimension {dim}, expected a multiple of the "
                    f"{self.size} ranks"
                )
            return dim % len(shape)
        return None

    def catalogue(self, catalogue: Catalogue, rank: int) -> Catalogue:
        """Return the tensors of `catalogue` as receiver `rank` has them."""
        return Catalogue(tuple(self._sliced(tensor, rank) for tensor in catalogue.tensors))

    def nbytes(self, catalogue: Catalogue) -> int:
        """Return the bytes that all receivers together have."""
        return sum(self.catalogue(catalogue, rank).nbytes for rank in range(self.size))

    def _sliced(self, tensor: PublishedTensor, rank: int) -> PublishedTensor:
        dim, part = self._dim(tensor), self.part(tensor, rank)
        if dim is None:
            return tensor
        shape = list(tensor.info.shape)
        shape[dim] = part.stop - part.start
        return tensor.with_shape(shape)

    def sink(self, rank: int, sink: Callable[[str, Tensor], object]) -> Callable[[str, Tensor], None]:
        """Return a sink for full tensors that calls `sink` with the slice of receiver `rank`, contiguous in memory."""
        if not 0 <= rank < self.size:
            raise ValueError(f"Slicing.sink: expected a rank from 0 to {self.size - 1}, found {rank}")

        def sliced(name: str, tensor: Tensor) -> None:
            described = PublishedTensor((name,), TensorInfo(tensor.shape, tensor.dtype))
            dim, part = self._dim(described), self.part(described, rank)
            whole = dim is None
            sink(name, tensor if whole else tensor.narrow(dim or 0, part.start, part.stop - part.start).contiguous())

        return sliced


def _cut(dim: int | None) -> str:
    return "does not cut" if dim is None else f"cuts dimension {dim} of"
