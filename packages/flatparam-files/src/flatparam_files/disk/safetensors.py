"""The safetensors format: the header, and the stream of the tensors behind it.

The format is that of https://huggingface.co/docs/safetensors: eight bytes with the header's length (little-endian), the
header (a JSON object, padded with spaces), and the tensors' row-major bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import parse_json, without_collector
from flatparam_files.disk.source import CHUNK_NBYTES, TensorInfo
from flatparam_files.disk.system import AnyPath, ByteFile, bytes_view

DTYPES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)
"""The safetensors name of each dtype that safetensors shares with torch."""


_BY_NAME: Final = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})
_MAX_HEADER_NBYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
_Infos: TypeAlias = dict[tuple[str, ...], tuple[TensorInfo, int]]
"""By dtype and sizes, what was described so and its bytes: most tensors of a file are like another one."""
_ONLY_INT: Final = frozenset({int})
_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})


@final
@attrs.frozen
class StoredTensor:
    """A tensor in a file: `[offset, offset + nbytes)` counts bytes from the beginning of the file."""

    info: TensorInfo
    offset: int

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.info.nbytes


@final
@attrs.frozen
class SafetensorsHeader:
    """The header of a safetensors file, checked against the file's size."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_start: int
    """The offset of the first byte behind the header."""
    file_nbytes: int


def read_header(path: AnyPath) -> SafetensorsHeader:
    """Read and check the header of a safetensors file; the tensors' bytes are not read.

    Memory: in proportion to the header's own bytes; nothing is allocated because a header says so.

    Raises:
        CheckpointError: if the file is not what the format demands, saying why.
    """
    with ByteFile(path) as file:
        data_start = _data_start(file)
        data = bytes(file.read(8, data_start - 8))
        try:
            return decode_header(data, file.nbytes)
        except ValueError as error:
            raise _bad(file.path, f"the header does not describe the file: {error}") from error


def _data_start(file: ByteFile) -> int:
    if file.nbytes < 10:
        raise _bad(file.path, f"expected at least 10 bytes, found {file.nbytes}")
    nbytes = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= nbytes <= min(file.nbytes - 8, _MAX_HEADER_NBYTES):
        raise _bad(file.path, f"it says that its header has {nbytes:,} bytes, and it has {file.nbytes:,} in all")
    return 8 + nbytes


def _bad(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a sound safetensors file: {why}", path=path, hint="use a different checkpoint")


def decode_header(data: bytes, file_nbytes: int) -> SafetensorsHeader:
    """Return the header in `data`, the bytes between the first eight and the tensors of a file of `file_nbytes`.

    Raises:
        ValueError: if it is not one, saying why.
    """
    tree = parse_json(data)
    if not isinstance(tree, dict):
        raise ValueError("expected a JSON object, found something else")
    # A name that is no text, such as half of a surrogate pair, is a ValueError here.
    "".join(tree).encode()
    metadata = tree.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} must be an object of strings")
    data_start = 8 + len(data)
    infos: _Infos = {}
    with without_collector():
        tensors = {name: _entry(name, entry, data_start, infos) for name, entry in tree.items()}
        order = sorted((each.offset, tree[name]["data_offsets"][1], name) for name, each in tensors.items())
    end = data_start
    for offset, stop, name in order:
        if offset != end:
            raise ValueError(f"tensor {name!r} begins at {offset}, and the one before it ends at {end}")
        end = data_start + stop
    if end != file_nbytes:
        raise ValueError(f"the tensors end at {end}, the file at {file_nbytes}")
    return SafetensorsHeader(tensors, metadata, data_start, file_nbytes)


def _entry(name: str, entry: Any, data_start: int, infos: _Infos) -> StoredTensor:
    """Return the tensor that an entry describes; `infos` has those that were described before, since most are alike."""
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise ValueError(f"tensor {name!r}: expected the keys {sorted(_KEYS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BY_NAME:
        raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(_BY_NAME)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: shape and offsets must be lists of numbers")
    key = (dtype, *shape)
    known = infos.get(key)
    if known is None:
        new = TensorInfo(shape, _BY_NAME[dtype])
        known = infos[key] = new, new.nbytes
    info, nbytes = known
    begin, end = offsets
    if end - begin != nbytes:
        raise ValueError(f"tensor {name!r}: offsets {offsets} do not hold {nbytes} bytes")
    return StoredTensor(info, data_start + begin)


def _are_sizes(value: Any) -> bool:
    # 63 bits, and few dimensions: so products stay small numbers. A bool is no number.
    if not isinstance(value, list) or len(value) > 64 or not _ONLY_INT.issuperset(map(type, value)):
        return False
    return not value or (min(value) >= 0 and max(value) < 2**63)


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before those of the tensors, which follow in the order of `tensors`.

    Raises:
        CheckpointError: for a dtype that safetensors does not have, or a name that is no text.
    """
    tree: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, info in tensors.items():
        if name == _METADATA or info.dtype not in DTYPES:
            raise CheckpointError(f"tensor {name!r} of {info.dtype}: safetensors cannot hold it", fqn=name)
        begin, end = end, end + info.nbytes
        tree[name] = {"dtype": DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
    try:
        data = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"expected text as the name of a tensor, found {error.object[error.start :][:20]!r}"
        ) from error
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


# A stream of tensors into a safetensors file: the header first, then the bytes of each tensor


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

    def write(self, name: str, chunks: Iterable[Tensor], observe: Callable[[memoryview], object] | None = None) -> None:
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
            raise ValueError(f"expected tensor {announced!r}, found {name!r}: write them as they were announced")
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
            raise ValueError(f"{len(self._left)} announced tensors were not written, first {self._left[-1][0]!r}")
        self._write(self._staging.take())
