"""The `.metadata` of a torch.distributed.checkpoint directory, read without importing what it names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Box
from flatparam_files.disk import MAX_DIMS, ByteFile, TensorInfo
from flatparam_files.disk.checkpoint_error import damage_named
from flatparam_files.formats.pickle_reader import AdmittedNames, InertObject, read_pickle
from flatparam_files.formats.torch_names import dtype_names, plain_dict

__all__ = ["METADATA_FILE", "Chunk", "DcpMetadata", "Item", "read_dcp_metadata"]

METADATA_FILE: Final = ".metadata"
_SHOWN: Final = 100
_MOST_PAIRS: Final = 2_000_000
"""The most pairs of chunks of one tensor that are compared; a grid of 120 by 120 chunks has so many."""
_HOME: Final = "torch.distributed.checkpoint.metadata"
_TENSOR: Final = f"{_HOME}.TensorStorageMetadata"
_BYTES: Final = f"{_HOME}.BytesStorageMetadata"


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


_NAMES: Final = AdmittedNames(
    values=dtype_names(),
    functions={
        "collections.OrderedDict": plain_dict,
        "torch.Size": lambda sizes=(): tuple(sizes),
        "torch.serialization._get_layout": str,
        "pathlib.PosixPath": _path,
        "pathlib.PurePosixPath": _path,
        "pathlib._local.PosixPath": _path,
        "pathlib._local.PurePosixPath": _path,
    },
    inert=frozenset(
        {
            _TENSOR,
            _BYTES,
            f"{_HOME}.Metadata",
            f"{_HOME}.ChunkStorageMetadata",
            f"{_HOME}.MetadataIndex",
            f"{_HOME}.StorageMeta",
            f"{_HOME}.TensorProperties",
            f"{_HOME}._MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
        }
    ),
    hint="If you trust whoever wrote it, load it with torch.distributed.checkpoint and save it again",
)


@final
@attrs.frozen
class Item:
    """The place of one entry of the checkpoint: a `torch.save` archive in a file; offset and size in bytes."""

    file: Path
    offset: int
    nbytes: int


@final
@attrs.frozen
class Chunk:
    """A box of a tensor, and where its elements are."""

    box: Box
    item: Item


@final
@attrs.frozen
class DcpMetadata:
    """The contents of a directory: chunks of tensors and other values by key, and the place of each key in the tree."""

    tensors: Mapping[str, tuple[TensorInfo, tuple[Chunk, ...]]]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    facts: Mapping[str, Any]


def read_dcp_metadata(directory: Path) -> DcpMetadata:
    """Read and check `.metadata`.

    Raises:
        CheckpointError: if it is damaged, or describes tensors whose chunks do not cover them.
    """
    file = directory / METADATA_FILE
    with ByteFile(file) as opened:
        data = bytes(opened.read(0, opened.nbytes))
    root = read_pickle(data, _NAMES, what=str(file))
    with damage_named(
        f"{file} does not describe a checkpoint", path=file, hint="it is damaged: copy it again"
    ):
        return _facts(_fields(root, f"{_HOME}.Metadata"), directory)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, InertObject) or value.name != name:
        raise ValueError(f"expected a {name}, found a {getattr(value, 'name', type(value).__name__)}")
    state = value.state if value.state is not None else {}
    if not isinstance(state, Mapping):
        raise ValueError(f"expected fields in a {name}, found none")
    return state


def _facts(metadata: Mapping[str, Any], directory: Path) -> DcpMetadata:
    places: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, stored in (metadata.get("storage_data") or {}).items():
        fields = _fields(index, f"{_HOME}.MetadataIndex")
        offset = fields.get("offset")
        places[fields["fqn"], None if offset is None else _sizes(offset)] = _item(stored, directory)
    tensors: dict[str, tuple[TensorInfo, tuple[Chunk, ...]]] = {}
    values: dict[str, Item] = {}
    for key, entry in metadata["state_dict_metadata"].items():
        if not isinstance(key, str):
            raise ValueError(f"expected string keys, found {key!r}")
        if isinstance(entry, InertObject) and entry.name == _BYTES:
            values[key] = places[key, None]
        else:
            tensors[key] = _tensor(key, _fields(entry, _TENSOR), places)
    _check_apart(values.values())
    return DcpMetadata(tensors, values, _paths(metadata.get("planner_data")), _known(metadata, places))


def _known(metadata: Mapping[str, Any], places: Mapping[Any, Item]) -> dict[str, Any]:
    meta = metadata.get("storage_meta")
    save_id = None if meta is None else _fields(meta, f"{_HOME}.StorageMeta").get("save_id")
    said = {"save_id": save_id, "version": metadata.get("version")}
    files = len({item.file for item in places.values()})
    return {"files": files, **{key: value for key, value in said.items() if isinstance(value, str)}}


def _paths(planned: Any) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(planned, Mapping):
        return {}
    paths = {str(key): tuple(path) for key, path in planned.items() if isinstance(path, (tuple, list))}
    if any(type(part) not in (str, int) for path in paths.values() for part in path):
        raise ValueError("a path has a part that is neither a name nor a number")
    return paths


def _item(stored: Any, directory: Path) -> Item:
    fields = _fields(stored, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name, offset, nbytes = fields["relative_path"], fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise ValueError(
            f"{name!r} is transformed by {fields['transform_descriptors']}, which only torch can undo"
        )
    if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"expected a file of the directory, found {name!r}")
    if not (type(offset) is int and type(nbytes) is int and offset >= 0 and nbytes >= 0):
        raise ValueError(f"{name!r} has no bytes [{offset!r}, +{nbytes!r})")
    return Item(directory / name, offset, nbytes)


def _sizes(sizes: Any) -> tuple[int, ...]:
    if (
        not isinstance(sizes, (tuple, list))
        or len(sizes) > MAX_DIMS
        or not all(type(size) is int and 0 <= size < 2**62 for size in sizes)
    ):
        raise ValueError(f"expected sizes, found {str(sizes)[:_SHOWN]}")
    return tuple(sizes)


def _tensor(
    key: str, fields: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...] | None], Item]
) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    properties = fields["properties"]
    if not isinstance(properties, InertObject):
        raise ValueError(f"{key!r} has no properties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {key!r} is {dtype!r}")
    shape = _sizes(fields["size"])
    boxes: dict[Box, Item] = {}
    for each in fields["chunks"]:
        chunk = _fields(each, f"{_HOME}.ChunkStorageMetadata")
        box = Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise ValueError(f"a chunk of {key!r} has other dimensions than the tensor, {shape}")
        if box.numel:
            boxes[box] = places[key, box.offsets]
    _check_cover(key, shape, list(boxes))
    return TensorInfo(shape, dtype), tuple(Chunk(box, item) for box, item in boxes.items())


def _check_cover(key: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuse chunks that overlap or leave something out."""
    whole = Box((0,) * len(shape), shape)
    if any(whole.overlap(box) != box for box in boxes) or sum(box.numel for box in boxes) != whole.numel:
        raise ValueError(f"the chunks of {key!r} do not make up a tensor of shape {shape}")
    if any(a.overlap(b).numel for a, b in _neighbours(key, boxes)):
        raise ValueError(f"chunks of {key!r} overlap")


def _neighbours(key: str, boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """The pairs of boxes that have a row in common, in the dimension in which most boxes begin at different rows."""
    dims = range(len(boxes[0].sizes) if boxes else 0)
    if not dims:
        return
    dim = max(dims, key=lambda each: len({box.offsets[each] for box in boxes}))
    left = _MOST_PAIRS
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda each: each.offsets[dim]):
        start = box.offsets[dim]
        open_boxes = [each for each in open_boxes if each.offsets[dim] + each.sizes[dim] > start]
        left -= len(open_boxes)
        if left < 0:
            raise ValueError(
                f"{key!r} has {len(boxes):,} chunks that lie beside each other, which are too many"
            )
        yield from ((each, box) for each in open_boxes)
        open_boxes.append(box)


def _check_apart(places: Iterable[Item]) -> None:
    """Refuse values that share some of their bytes: a small file of many such values would be read again and again."""
    last: Item | None = None
    for item in sorted(set(places), key=lambda each: (str(each.file), each.offset, each.nbytes)):
        if last is not None and item.file == last.file and item.offset < last.offset + last.nbytes:
            raise ValueError(f"two values share the byte {item.offset} of {item.file.name!r}")
        last = item if item.nbytes else last
