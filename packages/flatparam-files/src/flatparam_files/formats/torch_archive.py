"""Files of `torch.save`, zip archives of a pickle and of storages: read without running the pickle, and written."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Span
from flatparam_files.disk.checkpoint_error import CheckpointError, damage_named
from flatparam_files.disk.source import TensorInfo
from flatparam_files.disk.system import ByteFile, buffer_of, open_regular
from flatparam_files.formats.output import Appended, SparseFile
from flatparam_files.formats.pickle_reader import AdmittedNames, Global, is_key, read_pickle
from flatparam_files.formats.pickle_writer import Persistent, PickledCall, pickle_of
from flatparam_files.formats.stored_tensors import Storage, Stored, StridedTensor, check_apart, row_major

# The dtypes of the storage classes that torch pickles a tensor with. The others go as an `UntypedStorage` and a dtype.
STORAGE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}


def dtype_names() -> dict[str, torch.dtype]:
    """Return every dtype of this torch by its dotted name."""
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _tensor(
    storage: TypedStorage, offset: int, size: Any, strides: tuple[int, ...], _: Any, hooks: Any, *rest: Any
) -> StridedTensor:
    """`_rebuild_tensor_v2`; in `_v3` the dtype follows the hooks, and in both the metadata may be last."""
    dtype = storage.dtype if storage.dtype is not None or not rest else rest[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no dtype")
    flags = rest[-1] if rest and isinstance(rest[-1], Mapping) else {}
    conjugated, negated = bool(flags.get("conj")), bool(flags.get("neg"))
    return StridedTensor(TensorInfo(size, dtype), storage.storage, offset, tuple(strides), conjugated, negated)


def _parameter(data: StridedTensor, *_: Any) -> StridedTensor:
    if not isinstance(data, StridedTensor):
        raise TypeError("expected a tensor to make a parameter of, found something else")
    return data


def _with_attributes(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any = None) -> Any:
    """Return a tensor or parameter that somebody has set attributes on, as FSDP1 does: without them."""
    if not isinstance(function, Global) or not function.name.startswith("torch._utils._rebuild_"):
        raise TypeError("a tensor is made by something else than torch's functions")
    return TORCH_NAMES.functions[function.name](*arguments)


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


def _bytes(data: bytes = b"") -> bytes:
    # Of a number, `bytes` would make that many zeros.
    if not isinstance(data, bytes):
        raise TypeError("bytes are made of something else")
    return data


def _size(sizes: tuple[int, ...] = ()) -> tuple[int, ...]:
    if not all(type(size) is int for size in sizes):
        raise TypeError("a size is not an integer")
    return tuple(sizes)


def _set(items: list[Any]) -> set[Any]:
    if not all(map(is_key, items)):
        raise TypeError("a set holds containers")
    return set(items)


def plain_dict(items: Any = ()) -> dict[Any, Any]:
    """A dictionary of pairs, as an OrderedDict is pickled; a TypeError if a key is none that a pickle may have."""
    pairs = items.items() if isinstance(items, Mapping) else [(key, value) for key, value in items]
    if not all(is_key(key) for key, _ in pairs):
        raise TypeError("a container is the key of a dictionary")
    return dict(pairs)


TORCH_NAMES: Final = AdmittedNames(
    values={
        **dtype_names(),
        "torch.storage.UntypedStorage": None,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        **{f"torch.{name}": dtype for dtype, name in STORAGE_NAMES.items()},
        "torch.strided": "strided",
    },
    functions={
        "collections.OrderedDict": plain_dict,
        # The state of PyTorch's MultiStepLR has one.
        "collections.Counter": lambda counts: Counter(plain_dict(counts)),
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
        "torch.Size": _size,
        "torch.device": lambda kind, index=None: kind if index is None else f"{kind}:{index}",
        "_codecs.encode": _encoded,
        "builtins.bytearray": _bytes,
        # Protocol 2 calls it without arguments for empty bytes.
        "builtins.bytes": _bytes,
        "builtins.set": _set,
        "builtins.complex": lambda real, imaginary: complex(real, imaginary),
    },
    hint=(
        "If you trust whoever wrote it, load it with torch.load(..., weights_only=False) and save again only "
        "tensors and plain values"
    ),
)


@final
@attrs.frozen
class TypedStorage:
    """A storage as a pickle names it; `dtype` is None for one of bytes."""

    storage: Storage
    dtype: torch.dtype | None


# Archives: read without running the pickle


_MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")


@final
@attrs.frozen
class Archive:
    """A `torch.save` archive: `root` is what was saved, with a `StridedTensor` for each tensor.

    `storages` are all the storages of the archive by name, also those that no tensor of `root` uses.
    """

    root: Any
    storages: Mapping[str, Storage]


def is_archive(path: Path) -> bool:
    """Return whether the file begins like what `torch.save` writes; a CheckpointError if it cannot be read."""
    with ByteFile(path) as file:
        return file.read(0, min(len(_MAGIC), file.nbytes)) == _MAGIC


def open_archive(
    path: Path,
    *,
    start: int = 0,
    nbytes: int | None = None,
    names: AdmittedNames = TORCH_NAMES,
    what: str | None = None,
) -> Archive:
    """Read the structure of what `torch.save` wrote, and none of the tensors' bytes.

    Args:
        start, nbytes: where in the file the archive lies, in bytes; `nbytes=None` is to its end.
        names: what the pickle may mention.
        what: what errors call it; the path otherwise.

    Raises:
        CheckpointError: if it is no such archive, is damaged, or holds what `names` does not admit.
    """
    what = what or str(path)
    broken = damage_named(
        f"{what} is not a whole archive of torch.save",
        path=path,
        hint="a file that torch before 1.6 wrote must be loaded and saved again; any other is damaged or cut short",
    )
    try:
        with broken, open(open_regular(path), "rb", buffering=0) as file:
            length = file.seek(0, io.SEEK_END)
            if start + (nbytes or 0) > length:
                raise CheckpointError(
                    f"{what} should go on to byte {start + (nbytes or 0)} of {path}, and the file has {length}: "
                    "it is cut short; copy it again"
                )
            window = _Window(file, start, length - start if nbytes is None else nbytes)
            return _read(window, path, names, what)
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error}", path=path) from error


def _read(window: _Window, path: Path, names: AdmittedNames, what: str) -> Archive:
    with zipfile.ZipFile(window) as archive:
        records: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename!r} is compressed, which torch.save never does")
            records[info.filename.partition("/")[2]] = info
        if "data.pkl" not in records:
            if "constants.pkl" in records or any(name.startswith("code/") for name in records):
                raise ValueError("it is a TorchScript program")
            raise ValueError("expected data.pkl in the archive, found none")
        storages, sound = {}, set[int]()
        for name, info in records.items():
            at = window.start + _data_offset(window, info)
            storages[name] = Storage(path, at, info.file_size, info.CRC, sound)
        check_apart(storages.values(), "of its records")
    with ByteFile(path) as whole:
        for storage in (each for name, each in storages.items() if not name.startswith("data/")):
            storage.check(whole)
    order = _record(storages["byteorder"]) if "byteorder" in storages else b"little"
    if order != b"little":
        raise ValueError(f"its byte order is {order!r}, and only little-endian files can be read")

    def persistent(identity: Any) -> TypedStorage:
        kind, dtype, key, _, numel = identity
        key = f"data/{key}"
        if kind != "storage" or key not in storages:
            raise ValueError(f"the storage {key!r} is not in the archive")
        itemsize = 1 if dtype is None else dtype.itemsize
        if type(numel) is not int or numel * itemsize > storages[key].nbytes:
            raise ValueError(f"the storage {key!r} has {storages[key].nbytes} bytes, and should have {numel} elements")
        return TypedStorage(storages[key], dtype)

    root = read_pickle(_record(storages["data.pkl"]), names, what=what, persistent=persistent)
    return Archive(root, {name: storage for name, storage in storages.items() if name.startswith("data/")})


def _record(storage: Storage) -> bytes:
    with ByteFile(storage.file) as file:
        return bytes(file.read(storage.start, storage.nbytes))


def _data_offset(window: _Window, info: zipfile.ZipInfo) -> int:
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER.size)
    magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
    at: int = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    if magic != _MAGIC or at + info.file_size > window.nbytes:
        raise ValueError(f"the record {info.filename!r} is not where the archive says that it is")
    return at


@final
class _Window:
    """The bytes `[start, start + nbytes)` of an open file, as the file that `zipfile` reads."""

    def __init__(self, file: io.FileIO, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self._file = file
        self._at = 0

    def tell(self) -> int:
        """Return the position, from the start of the window."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; see `io.IOBase.seek`."""
        self._at = offset + (0, self._at, self.nbytes)[whence]
        if self._at < 0:
            raise ValueError("a record begins before the archive")
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, fewer at the end of the window."""
        left = max(0, self.nbytes - self._at)
        self._file.seek(self.start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


# Writing what `torch.load` reads, with the bytes of the tensors streamed from a source


_ALIGNMENT: Final = 64
_LOCAL_HEADER_NBYTES: Final = 30
_ZIP64_EXTRA_NBYTES: Final = 20
# Torch marks its own padding with it.
_PADDING_ID: Final = 0x4246
_LARGE: Final = (1 << 31) - 1
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


class _Archive(zipfile.ZipFile):
    def __del__(self) -> None:
        """Nothing: the finalizer of the class ends the archive, which it cannot where an interrupt came inside."""


def write_archive(file: SparseFile, root: Any) -> None:
    """Append the archive of a tree whose tensors are `Stored`; it begins at the file's position.

    Tensors that are equal are written once. Extra memory: the structure and one chunk. Equal trees become equal bytes.
    """
    tensors: dict[Stored, int] = {}
    data = pickle_of(_named(root, tensors))
    window = Appended(file)
    try:
        archive = _Archive(window, "w", zipfile.ZIP_STORED)
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
        archive.close()
    except BaseException:
        # An interrupt inside of `zipfile` leaves a record open, which its finalizer ends.
        window.give_up()
        raise


def _named(tree: Any, tensors: dict[Stored, int]) -> Any:
    """Return the tree with each tensor as what torch pickles in its place; the tensors are added to `tensors`."""
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
