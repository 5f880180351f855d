"""A stream of tensors into a safetensors file: the header first, then the bytes of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, final

import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_files.disk.safetensors.header import encode_header
from flatparam_files.disk.source import CHUNK_NBYTES, TensorInfo
from flatparam_files.disk.tensor_bytes import bytes_view

__all__ = ["Staging", "TensorFileWriter"]


@final
class Staging:
    """The one buffer in host memory through which tensors go to a file."""

    __slots__ = ("_bytes", "_tensor", "_used", "nbytes")

    def __init__(self, nbytes: int = CHUNK_NBYTES) -> None:
        """Allocate the buffer."""
        self.nbytes = nbytes
        self._bytes = memoryview(bytearray(nbytes))
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._used = 0

    def put(self, tensor: Tensor, start: int) -> memoryview:
        """Copy bytes of `tensor` (1-D, `torch.uint8`) from `start` on, as many as there is room for; returns them."""
        count = min(self.nbytes - self._used, tensor.numel() - start)
        begin, end = self._used, self._used + count
        self._tensor[begin:end].copy_(tensor[start : start + count])
        self._used = end
        return self._bytes[begin:end]

    @property
    def is_full(self) -> bool:
        """Whether there is no room left."""
        return self._used == self.nbytes

    def take(self) -> memoryview:
        """Empty the buffer; returns the bytes that were in it, which last until the next `put`."""
        used, self._used = self._used, 0
        return self._bytes[:used]


class _Writable(Protocol):
    """A file, as far as it is needed here."""

    def write(self, data: memoryview, /) -> int: ...


@final
class TensorFileWriter:
    """Writes one safetensors file: the header first, then each tensor, in the order that was announced.

    Memory: the staging buffer, whatever the size of the tensors.
    """

    __slots__ = ("_file", "_left", "_staging", "header")

    def __init__(
        self,
        file: _Writable,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        *,
        staging: Staging | None = None,
    ) -> None:
        """Begin a file.

        Args:
            file: open for writing, empty, best without a buffer of its own; the caller closes it.
            tensors: what will be written, in this order.
            metadata: strings that the header carries.
        """
        self._file = file
        self._left = list(tensors.items())[::-1]
        self._staging = staging or Staging()
        self.header = encode_header(tensors, metadata)
        self._write(memoryview(self.header))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finish()

    def write(
        self, name: str, chunks: Iterable[Tensor], observe: Callable[[memoryview], object] | None = None
    ) -> None:
        """Write the next tensor.

        Args:
            name: the next of the announced names.
            chunks: its row-major elements in order, tensors of its dtype, of any shape, on any device.
            observe: is shown all bytes, in order.

        Raises:
            ValueError: if a different tensor, dtype or number of elements was announced.
        """
        announced, info = self._left.pop()
        if announced != name:
            raise ValueError(
                f"expected tensor {announced!r}, found {name!r}: write them as they were announced"
            )
        numel = 0
        for chunk in chunks:
            if chunk.dtype != info.dtype:
                raise ValueError(f"tensor {name!r}: expected {info.dtype}, found {chunk.dtype}")
            numel += chunk.numel()
            self._stage(bytes_view(chunk), observe)
        if numel != info.numel:
            raise ValueError(f"tensor {name!r}: expected {info.numel} elements, found {numel}")

    def _stage(self, tensor: Tensor, observe: Callable[[memoryview], object] | None) -> None:
        start = 0
        while start < tensor.numel():
            view = self._staging.put(tensor, start)
            start += len(view)
            if observe is not None:
                observe(view)
            if self._staging.is_full:
                self._write(self._staging.take())

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Write what is still staged.

        Raises:
            ValueError: if announced tensors are missing.
        """
        if self._left:
            raise ValueError(
                f"{len(self._left)} announced tensors were not written, first {self._left[-1][0]!r}"
            )
        self._write(self._staging.take())
