"""Tensors in files: where their bytes are, and how any range of their elements is read."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_core import Box, Span, Threshold
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import TensorInfo, chunk_spans, read_boxes
from flatparam_files.disk.system import ByteFile, bytes_of, tensor_of

# A read may fetch this many times the bytes that it needs before it is split into smaller ones.
_WASTE: Final = 2
WORTH_A_READ: Final = Threshold(
    "state.worth_a_read_nbytes",
    1 << 16,
    "Up to so many bytes are fetched in one read, though not all are needed; above, only if most of them are.",
    least=0,
)


@attrs.frozen(eq=False)
class Stored(ABC):
    """A tensor of a checkpoint, of whatever format. Two that are equal are one tensor: tied weights."""

    info: TensorInfo

    @abstractmethod
    def read(self, span: Span) -> Iterator[Tensor]:
        """Return the row-major elements `span`, in pieces; see `Source.read`."""

    def storages(self) -> Iterator[Storage]:
        """Return the parts of files that it lies in, as far as they are known."""
        return iter(())


@final
@attrs.frozen
class Storage:
    """`nbytes` bytes of a file, from byte `start` on: what the elements of stored tensors lie in.

    `crc` is the CRC-32 that the file says they have, or 0 if it says nothing. It is compared once, before anything
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
            CheckpointError: if they are not what was written.
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
                hint="the file is damaged: copy it again, or use a different checkpoint",
            )
        self.sound.add(self.start)


def check_apart(storages: Iterable[Storage], what: str) -> None:
    """Refuse `what` shares bytes of a file: a small file of many such storages would be read again and again."""
    last: Storage | None = None
    for each in sorted(storages, key=lambda each: (str(each.file), each.start, each.nbytes)):
        if last is not None and each.file == last.file and each.start < last.start + last.nbytes:
            raise ValueError(f"two {what} share the byte {each.start} of {each.file.name!r}")
        last = each if each.nbytes else last


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


@final
@attrs.frozen
class StridedTensor(Stored):
    """A strided tensor in a storage; it is conjugated, then negated, if the flags say so.

    `offset` and `strides` are in elements.
    """

    storage: Storage
    offset: int
    strides: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False

    def __attrs_post_init__(self) -> None:
        shape = self.info.shape
        if any(type(number) is not int for number in (*shape, *self.strides, self.offset)):
            raise TypeError(f"sizes that are no integers: {shape}, {self.strides}")
        if len(shape) != len(self.strides) or any(size < 0 for size in shape):
            raise ValueError(f"strides {self.strides} do not fit the shape {shape}")
        if self.offset < 0 or any(stride < 0 for stride in self.strides):
            raise ValueError(f"negative strides or offset: {self.strides}, {self.offset}")
        end = (self.offset + _extent(shape, self.strides)) * self.info.dtype.itemsize
        if self.info.numel and end > self.storage.nbytes:
            raise ValueError(f"a tensor ends at byte {end} of a storage of {self.storage.nbytes} bytes")

    def read(self, span: Span) -> Iterator[Tensor]:
        """Yield the elements `span`, in one pass of the file if they lie side by side, and else box by box."""
        with ByteFile(self.storage.file) as file:
            self.storage.check(file)
            if self._is_contiguous():
                for piece in chunk_spans(span, self.info.dtype.itemsize):
                    yield self._resolved(self._elements(file, self.offset + piece.start, piece.numel))
            else:
                for chunk in read_boxes(self.info, span, lambda box, out: self._read_box(file, box, out)):
                    yield self._resolved(chunk)

    def read_into(self, span: Span, out: Tensor) -> Iterator[int]:
        """Read the elements `span` into `out` itself, without a copy; yields the bytes of each piece that is there.

        Args:
            out: 1-D, contiguous, on the CPU, of as many elements and of a dtype that `can_fill` admits.
        """
        target, itemsize = bytes_of(out.view(torch.uint8)), self.info.dtype.itemsize
        with ByteFile(self.storage.file) as file:
            self.storage.check(file)
            for piece in chunk_spans(span, itemsize):
                start, nbytes = (self.storage.start + (self.offset + piece.start) * itemsize, piece.numel * itemsize)
                at = (piece.start - span.start) * itemsize
                file.read_into(start, nbytes, target[at : at + nbytes])
                yield nbytes

    def can_fill(self, out: Tensor) -> bool:
        """Whether the bytes of the file are, one after the other, those of the elements that `out` is to have."""
        is_plain = self._is_contiguous() and not (self.conjugated or self.negated)
        return is_plain and out.is_cpu and out.dtype == self.info.dtype and out.is_contiguous()

    def read_box(self, box: Box, out: Tensor) -> None:
        """Read the elements of a box into `out`, of the sizes of the box, without the flags.

        Extra memory: about twice `out`, or 64 KiB: what lies scattered is read in smaller boxes.
        """
        with ByteFile(self.storage.file) as file:
            self.storage.check(file)
            self._read_box(file, box, out)

    def storages(self) -> Iterator[Storage]:
        """Yield the one storage."""
        yield self.storage

    def _is_contiguous(self) -> bool:
        dims = zip(self.info.shape, self.strides, row_major(self.info.shape), strict=True)
        return all(size == 1 or stride == expected for size, stride, expected in dims)

    def _read_box(self, file: ByteFile, box: Box, out: Tensor) -> None:
        extent = _extent(box.sizes, self.strides)
        if extent * out.itemsize > max(WORTH_A_READ.value, _WASTE * out.nbytes) and out.numel() > 1:
            _, dim = max((stride, dim) for dim, stride in enumerate(self.strides) if box.sizes[dim] > 1)
            half = box.sizes[dim] // 2
            for start, size in ((0, half), (half, box.sizes[dim] - half)):
                self._read_box(file, _part(box, dim, start, size), out.narrow(dim, start, size))
            return
        start = self.offset + sum(i * s for i, s in zip(box.offsets, self.strides, strict=True))
        out.copy_(self._elements(file, start, extent).as_strided(box.sizes, self.strides))

    def _elements(self, file: ByteFile, start: int, numel: int) -> Tensor:
        itemsize = self.info.dtype.itemsize
        return tensor_of(file.read(self.storage.start + start * itemsize, numel * itemsize), self.info.dtype)

    def _resolved(self, elements: Tensor) -> Tensor:
        if self.conjugated:
            elements = elements.conj().resolve_conj()
        return -elements if self.negated else elements


def _part(box: Box, dim: int, start: int, size: int) -> Box:
    """Return the elements `[start, start + size)` of a box in one dimension."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last element of a strided box, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
