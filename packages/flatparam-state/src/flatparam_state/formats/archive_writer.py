"""Writing what `torch.load` reads, with the bytes of the tensors streamed from a source."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Final, cast

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.formats.archive import STORAGE_NAMES
from flatparam_state.formats.output import SparseFile, buffer_of
from flatparam_state.formats.pickle_writer import Call, Persistent, pickle_of
from flatparam_state.formats.pickled import Global
from flatparam_state.formats.regions import row_major
from flatparam_state.source import TensorInfo

__all__ = ["Streamed", "write_archive"]

_ALIGNMENT: Final = 64
_LOCAL_HEADER_NBYTES: Final = 30
_ZIP64_EXTRA_NBYTES: Final = 20
_PADDING_ID: Final = 0x4246  # what torch marks its own padding with
_LARGE: Final = (1 << 31) - 1
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


@final
@attrs.frozen(eq=False)
class Streamed:
    """A tensor that is about to be written: contiguous, its elements from `read`.

    Two of one `key` share their memory for the reader, and are written once.
    """

    key: str
    info: TensorInfo
    read: Callable[[Span], Iterable[torch.Tensor]]


def write_archive(file: SparseFile, root: Any) -> None:
    """Append the archive of a tree whose tensors are `Streamed`; it begins at the file's position.

    Extra memory: the structure and one chunk. Equal trees become equal bytes.
    """
    streams: dict[str, tuple[int, Streamed]] = {}
    data = pickle_of(_named(root, streams))
    window = cast("IO[bytes]", _Appending(file))
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as archive:
        _put(archive, window, "data.pkl", len(data), [data])
        _put(archive, window, ".format_version", 1, [b"1"])
        _put(archive, window, ".storage_alignment", 2, [str(_ALIGNMENT).encode()])
        _put(archive, window, "byteorder", 6, [b"little"])
        for number, stream in streams.values():
            chunks = stream.read(Span(0, stream.info.numel))
            _put(archive, window, f"data/{number}", stream.info.nbytes, map(buffer_of, chunks))
        _put(archive, window, "version", 2, [b"3\n"])
        identity = str(int(hashlib.sha256(data).hexdigest(), 16))[:40].zfill(40).encode()
        _put(archive, window, ".data/serialization_id", 40, [identity])


def _named(tree: Any, streams: dict[str, tuple[int, Streamed]]) -> Any:
    """The tree with each tensor as what torch pickles in its place; the tensors are added to `streams`."""
    if isinstance(tree, Mapping):
        return {key: _named(value, streams) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_named(value, streams) for value in tree)
    if not isinstance(tree, Streamed):
        return tree
    number, _ = streams.setdefault(tree.key, (len(streams), tree))
    info = tree.info
    storage = STORAGE_NAMES.get(info.dtype)
    count = info.nbytes if storage is None else info.numel
    kind = Global("torch.storage.UntypedStorage" if storage is None else f"torch.{storage}")
    identity = Persistent(("storage", kind, str(number), "cpu", count))
    no_hooks = Call(Global("collections.OrderedDict"))
    arguments = (identity, 0, info.shape, row_major(info.shape), False, no_hooks)
    if storage is None:
        return Call(Global("torch._utils._rebuild_tensor_v3"), (*arguments, info.dtype))
    return Call(Global("torch._utils._rebuild_tensor_v2"), arguments)


def _put(
    archive: zipfile.ZipFile, window: IO[bytes], name: str, nbytes: int, chunks: Iterable[bytes | memoryview]
) -> None:
    record = zipfile.ZipInfo(f"archive/{name}", _EPOCH)
    large = nbytes >= _LARGE
    header = _LOCAL_HEADER_NBYTES + len(record.filename) + 4 + (_ZIP64_EXTRA_NBYTES if large else 0)
    padding = -(window.tell() + header) % _ALIGNMENT
    record.extra = _PADDING_ID.to_bytes(2, "little") + padding.to_bytes(2, "little") + bytes(padding)
    record.file_size = nbytes
    with archive.open(record, "w", force_zip64=large) as out:
        for chunk in chunks:
            out.write(chunk)


@final
class _Appending(io.RawIOBase):
    """What follows a position of a file, as a file of its own."""

    def __init__(self, file: SparseFile) -> None:
        self._file = file
        self._start = file.tell()

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position, from where it began."""
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, counted from where it began."""
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only positions from the start")
        self._file.seek(self._start + offset)
        return offset

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        return self._file.write(data)
