"""Pieces of tensors: which boxes a range of row-major elements covers, and how a stored tensor is read through them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.byte_file import ByteFile, tensor_of
from flatparam_state.errors import CheckpointError
from flatparam_state.source import TensorInfo, chunk_spans

__all__ = ["Box", "StridedTensor", "Storage", "boxes_of", "read_box", "row_major"]

# A read may fetch this many times the bytes that it needs before it is split into smaller ones.
_WASTE: Final = 2
# And this many bytes at least: a read costs about as much as copying so many.
_WORTH_A_READ: Final = 1 << 16


@final
@attrs.frozen
class Box:
    """The elements `start[d] <= i[d] < start[d] + sizes[d]` of a tensor of `len(start)` dimensions."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements lie in the box."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """The part common to both, in the coordinates of both; without elements where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self._stop(), other._stop())
        return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, stop, strict=True)))

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same elements counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.sizes)

    def split(self, dim: int) -> tuple[Box, Box]:
        """Two halves, cut across `dim`."""
        half = self.sizes[dim] // 2
        middle = _with(self.start, dim, self.start[dim] + half)
        first, second = half, self.sizes[dim] - half
        return Box(self.start, _with(self.sizes, dim, first)), Box(middle, _with(self.sizes, dim, second))

    def _stop(self) -> Iterator[int]:
        return (begin + size for begin, size in zip(self.start, self.sizes, strict=True))


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def boxes_of(span: Span, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that the row-major elements `span` of a tensor of `shape` are, in order; each is a run of them."""
    if not span:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = span.start // inner, (span.stop - 1) // inner
    if first == last and span.numel < inner:
        yield from _within(first, span.relative_to(first * inner), shape)
        return
    if span.start > first * inner:
        yield from _within(first, Span(span.start - first * inner, inner), shape)
        first += 1
    whole = last + 1 if span.stop == (last + 1) * inner else last
    if whole > first:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (whole - first, *shape[1:]))
    if whole == last:
        yield from _within(last, Span(0, span.stop - last * inner), shape)


def _within(row: int, span: Span, shape: Sequence[int]) -> Iterator[Box]:
    for box in boxes_of(span, shape[1:]):
        yield Box((row, *box.start), (1, *box.sizes))


@final
@attrs.frozen
class Storage:
    """`nbytes` bytes of a file, from byte `start` on: what the elements of stored tensors lie in.

    `crc` is the CRC-32 that the file says they have, or 0 where it says nothing. It is compared once, before anything
    is read; `sound` are the starts of those for which it was, shared by the storages of one archive.
    """

    file: Path
    start: int
    nbytes: int
    crc: int = 0
    sound: set[int] = attrs.field(factory=set, eq=False, repr=False)

    def check(self, file: ByteFile) -> None:
        """Read all bytes and compare their checksum, if there is one and that was not done before.

        Raises:
            CheckpointError: where they are not what was written.
        """
        if not self.crc or self.start in self.sound:
            return
        crc = 0
        for span in chunk_spans(Span(self.start, self.start + self.nbytes), 1):
            crc = zlib.crc32(file.read(span.start, span.numel), crc)
        if crc != self.crc:
            raise CheckpointError(
                f"{self.file}: the bytes [{self.start}, {self.start + self.nbytes}) are not what was written: expected "
                f"checksum {self.crc:08x}, found {crc:08x}",
                path=self.file,
                hint="the file is damaged: copy it again, or use another checkpoint",
            )
        self.sound.add(self.start)


@final
@attrs.frozen
class StridedTensor:
    """A strided tensor in a storage; it is conjugated, then negated, where the flags say so.

    `offset` and `strides` are in elements.
    """

    info: TensorInfo
    storage: Storage
    offset: int
    strides: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False

    def __attrs_post_init__(self) -> None:
        shape = self.info.shape
        numbers = [*shape, *self.strides, self.offset]
        if any(type(number) is not int for number in numbers):
            raise TypeError(f"sizes that are no integers: {shape}, {self.strides}")
        if len(shape) != len(self.strides) or any(size < 0 for size in shape):
            raise ValueError(f"strides {self.strides} do not fit the shape {shape}")
        if self.offset < 0 or any(stride < 0 for stride in self.strides):
            raise ValueError(f"negative strides or offset: {self.strides}, {self.offset}")
        end = (self.offset + _extent(shape, self.strides)) * self.info.dtype.itemsize
        if self.info.numel and end > self.storage.nbytes:
            raise ValueError(f"a tensor ends at byte {end} of a storage of {self.storage.nbytes} bytes")

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other, in row-major order."""
        expected = row_major(self.info.shape)
        dims = zip(self.info.shape, self.strides, expected, strict=True)
        return all(size == 1 or stride == want for size, stride, want in dims)

    def read(self, span: Span) -> Iterator[torch.Tensor]:
        """The row-major elements `span`, as 1-D tensors of at most `CHUNK_NBYTES`."""
        dtype = self.info.dtype
        with ByteFile(self.storage.file) as file:
            self.storage.check(file)
            for piece in chunk_spans(span, dtype.itemsize):
                if self.contiguous:
                    start = self.storage.start + (self.offset + piece.start) * dtype.itemsize
                    yield self._resolved(tensor_of(file.read(start, piece.numel * dtype.itemsize), dtype))
                    continue
                out = torch.empty(piece.numel, dtype=dtype)
                at = 0
                for box in boxes_of(piece, self.info.shape):
                    read_box(file, self, box, out[at : at + box.numel].view(box.sizes))
                    at += box.numel
                yield self._resolved(out)

    def storages(self) -> Iterator[Storage]:
        """What it lies in."""
        yield self.storage

    def _resolved(self, elements: torch.Tensor) -> torch.Tensor:
        if self.conjugated:
            elements = elements.conj().resolve_conj()
        return -elements if self.negated else elements


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie between the first and the last element of a strided box, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def read_box(file: ByteFile, stored: StridedTensor, box: Box, out: torch.Tensor) -> None:
    """Read the elements `box` of a stored tensor into `out`, of the sizes of the box.

    Extra memory: about twice `out`, or 64 KiB: what lies scattered is read in smaller boxes.
    """
    if not box.numel:
        return
    itemsize = stored.info.dtype.itemsize
    extent = _extent(box.sizes, stored.strides)
    if extent * itemsize > max(_WORTH_A_READ, _WASTE * box.numel * itemsize) and max(box.sizes) > 1:
        wide = [s if n > 1 else -1 for n, s in zip(box.sizes, stored.strides, strict=True)]
        dim = wide.index(max(wide))
        first, second = box.split(dim)
        half = first.sizes[dim]
        read_box(file, stored, first, out.narrow(dim, 0, half))
        read_box(file, stored, second, out.narrow(dim, half, second.sizes[dim]))
        return
    start = stored.offset + sum(i * s for i, s in zip(box.start, stored.strides, strict=True))
    data = file.read(stored.storage.start + start * itemsize, extent * itemsize)
    out.copy_(tensor_of(data, stored.info.dtype).as_strided(box.sizes, stored.strides))
