"""Writing what `torch.load` reads, with the bytes of the tensors streamed from a source."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from flatparam_core import Span
from flatparam_files.disk import buffer_of
from flatparam_files.formats.output import Appended, SparseFile
from flatparam_files.formats.pickles import Global, Persistent, PickledCall, pickle_of
from flatparam_files.formats.stored import Stored, row_major
from flatparam_files.formats.torch_save.names import STORAGE_NAMES

__all__ = ["write_archive"]

_ALIGNMENT: Final = 64
_LOCAL_HEADER_NBYTES: Final = 30
_ZIP64_EXTRA_NBYTES: Final = 20
# Torch marks its own padding with it.
_PADDING_ID: Final = 0x4246
_LARGE: Final = (1 << 31) - 1
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def write_archive(file: SparseFile, root: Any) -> None:
    """Append the archive of a tree whose tensors are `Stored`; it begins at the file's position.

    Tensors that are equal are written once. Extra memory: the structure and one chunk. Equal trees become equal bytes.
    """
    tensors: dict[Stored, int] = {}
    data = pickle_of(_named(root, tensors))
    window = Appended(file)
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as archive:
        _put(archive, window, "data.pkl", len(data), [data])
        _put(archive, window, ".format_version", 1, [b"1"])
        _put(archive, window, ".storage_alignment", 2, [str(_ALIGNMENT).encode()])
        _put(archive, window, "byteorder", 6, [b"little"])
        for stored, number in tensors.items():
            chunks = stored.read(Span(0, stored.info.numel))
            _put(archive, window, f"data/{number}", stored.info.nbytes, map(buffer_of, chunks))
        _put(archive, window, "version", 2, [b"3\n"])
        identity = str(int(hashlib.sha256(data).hexdigest(), 16))[:40].zfill(40).encode()
        _put(archive, window, ".data/serialization_id", 40, [identity])


def _named(tree: Any, tensors: dict[Stored, int]) -> Any:
    """The tree with each tensor as what torch pickles in its place; the tensors are added to `tensors`."""
    if isinstance(tree, Mapping) and not isinstance(tree, Counter):
        return {key: _named(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_named(value, tensors) for value in tree)
    if not isinstance(tree, Stored):
        return tree
    number = tensors.setdefault(tree, len(tensors))
    info = tree.info
    storage = STORAGE_NAMES.get(info.dtype)
    count = info.nbytes if storage is None else info.numel
    kind = Global("torch.storage.UntypedStorage" if storage is None else f"torch.{storage}")
    identity = Persistent(("storage", kind, str(number), "cpu", count))
    no_hooks = PickledCall(Global("collections.OrderedDict"))
    arguments = (identity, 0, info.shape, row_major(info.shape), False, no_hooks)
    if storage is None:
        return PickledCall(Global("torch._utils._rebuild_tensor_v3"), (*arguments, info.dtype))
    return PickledCall(Global("torch._utils._rebuild_tensor_v2"), arguments)


def _put(
    archive: zipfile.ZipFile, window: Appended, name: str, nbytes: int, chunks: Iterable[bytes | memoryview]
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
