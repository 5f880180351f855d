"""Writing a directory that `torch.distributed.checkpoint.load` reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
from torch import Tensor

from flatparam_core import Box, Span
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source, TensorInfo
from flatparam_files.disk.system import AnyPath
from flatparam_files.formats.dcp_reader import METADATA_FILE
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.pickle_reader import Global
from flatparam_files.formats.pickle_writer import PickledCall, pickle_of
from flatparam_files.formats.stored_tensors import Stored
from flatparam_files.formats.torch_archive import write_archive
from flatparam_files.formats.whole_sources import tree_of

_HOME: Final = "torch.distributed.checkpoint.metadata"
_VERSION: Final = "1.0.0"
_Path = tuple[str | int, ...]


def write_dcp(source: Source, path: AnyPath, *, world_size: int = 1, dry_run: bool = False) -> dict[str, int]:
    """Write a source as `torch.distributed.checkpoint.save({"model": ..., "optimizer": ..., "extra": ...})` would.

    Args:
        world_size: the files that it is spread over; tensors are cut along their first dimension, as FSDP2 does.
            It can be loaded at any world size.
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file, relative to `path`.

    Extra memory: the structure and one chunk.

    Raises:
        CheckpointError: if `path` exists, or two entries would have the same key.
    """
    flattened = list(_flattened(tree_of(source)))
    entries = dict(flattened)
    keys = {".".join(map(str, parts)): parts for parts in entries}
    if len(keys) < len(flattened):
        raise CheckpointError(f"{path}: two entries would have the same key in this format", path=path)
    files = {
        f"__{rank}_0.distcp": sum(_nbytes(info, rank, world_size) for info in source.tensors.values())
        for rank in range(world_size)
    }
    check_new(Path(path))
    if dry_run:
        return files
    with appearing(Path(path)) as temporary:
        temporary.mkdir()
        writer = _EntryWriter(keys)
        for rank, name in enumerate(files):
            with SparseFile(temporary / name) as file:
                for key, parts in keys.items():
                    writer.write(file, name, key, entries[parts], rank, world_size)
        with SparseFile(temporary / METADATA_FILE) as file:
            file.write(pickle_of(writer.metadata()))
    return files


def _nbytes(info: TensorInfo, rank: int, world_size: int) -> int:
    box = _box_of(info.shape, rank, world_size)
    return 0 if box is None else box.numel * info.dtype.itemsize


def _flattened(tree: Any, parts: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield the entries of a tree by path, as torch flattens it: a list of plain values is one entry."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flattened(value, (*parts, str(key)))
    elif _is_whole(tree):
        yield parts, tree
    else:
        for index, value in enumerate(tree):
            yield from _flattened(value, (*parts, index))


def _is_whole(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or not any(
        isinstance(each, Stored) or (isinstance(each, (Mapping, list)) and not _is_whole(each)) for each in value
    )


def _box_of(shape: tuple[int, ...], rank: int, world_size: int) -> Box | None:
    """Return the part of a tensor that a rank writes: rows as `torch.chunk` cuts them; None if it writes nothing."""
    if not shape or not math.prod(shape):
        return Box((0,) * len(shape), shape) if rank == 0 else None
    step = -(-shape[0] // world_size)
    start = min(rank * step, shape[0])
    rows = min(step, shape[0] - start)
    return Box((start, *(0 for _ in shape[1:])), (rows, *shape[1:])) if rows else None


@final
class _EntryWriter:
    """Appends entries to files, and keeps account of where each is."""

    def __init__(self, paths: Mapping[str, _Path]) -> None:
        self.paths = paths
        self._chunks: dict[str, tuple[TensorInfo, list[Box]]] = {}
        self._places: list[tuple[str, tuple[int, ...] | None, str, int, int]] = []

    def write(self, file: SparseFile, name: str, key: str, value: Any, rank: int, world_size: int) -> None:
        """Append this rank's part of an entry."""
        begin = file.tell()
        offset: tuple[int, ...] | None = None
        if isinstance(value, Stored):
            box = _box_of(value.info.shape, rank, world_size)
            if box is None:
                return
            offset = box.offsets
            self._chunks.setdefault(key, (value.info, []))[1].append(box)
            first = math.prod(box.sizes[1:]) * offset[0] if offset else 0
            write_archive(file, _Rows(TensorInfo(box.sizes, value.info.dtype), value, first))
        elif rank == 0:
            write_archive(file, value)
        else:
            return
        self._places.append((key, offset, name, begin, file.tell() - begin))

    def metadata(self) -> PickledCall:
        """Return the object that `.metadata` is the pickle of."""
        value = _new(f"{_HOME}.BytesStorageMetadata", {})
        entries = {key: _tensor(*self._chunks[key]) if key in self._chunks else value for key in self.paths}
        places = {
            _new(f"{_HOME}.MetadataIndex", {"fqn": key, "index": None, "offset": _size(offset)}): _new(
                "torch.distributed.checkpoint.filesystem._StorageInfo",
                {"relative_path": name, "offset": begin, "length": nbytes},
            )
            for key, offset, name, begin, nbytes in self._places
        }
        meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        fields = {
            "state_dict_metadata": entries,
            "planner_data": dict(self.paths),
            "storage_data": places,
            "storage_meta": _new(f"{_HOME}.StorageMeta", meta),
            "version": _VERSION,
        }
        return _new(f"{_HOME}.Metadata", fields)


@final
@attrs.frozen
class _Rows(Stored):
    """The rows of a tensor from element `begin` on."""

    whole: Stored
    begin: int

    def read(self, span: Span) -> Iterator[Tensor]:
        return self.whole.read(span.shifted(self.begin))


def _new(name: str, fields: Mapping[str, Any]) -> PickledCall:
    return PickledCall(Global(name), (), dict(fields), new=True)


def _size(sizes: tuple[int, ...] | None) -> PickledCall | None:
    return None if sizes is None else PickledCall(Global("torch.Size"), (sizes,))


def _tensor(info: TensorInfo, boxes: list[Box]) -> PickledCall:
    layout = PickledCall(Global("torch.serialization._get_layout"), ("torch.strided",))
    memory_format = PickledCall(Global(f"{_HOME}._MEM_FORMAT_ENCODING"), (0,))
    properties = PickledCall(
        Global(f"{_HOME}.TensorProperties"), (), (info.dtype, layout, False, memory_format, False), new=True
    )
    chunks = [
        _new(f"{_HOME}.ChunkStorageMetadata", {"offsets": _size(box.offsets), "sizes": _size(box.sizes)})
        for box in boxes
    ]
    return _new(
        f"{_HOME}.TensorStorageMetadata", {"properties": properties, "size": _size(info.shape), "chunks": chunks}
    )
