"""Directories of torch.distributed.checkpoint, to which FSDP1 and FSDP2 save: read without importing what they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Box, Span
from flatparam_files.disk.checkpoint_error import CheckpointError, damage_named
from flatparam_files.disk.limits import MAX_DIMS
from flatparam_files.disk.source import TensorInfo, read_boxes
from flatparam_files.disk.system import AnyPath, ByteFile
from flatparam_files.formats.arrange import MODEL_KEYS, OPTIMIZER_KEYS, arranged, together
from flatparam_files.formats.pickle_reader import AdmittedNames, InertObject, read_pickle
from flatparam_files.formats.stored_tensors import Storage, Stored, StridedTensor, check_apart
from flatparam_files.formats.torch_archive import dtype_names, open_archive, plain_dict
from flatparam_files.formats.whole_sources import StoredSource

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
class Chunk:
    """A box of a tensor, and where in a file the `torch.save` archive of its elements is."""

    box: Box
    item: Storage


@final
@attrs.frozen
class DcpMetadata:
    """The contents of a directory: chunks of tensors and other values by key, and the place of each key in the tree."""

    tensors: Mapping[str, tuple[TensorInfo, tuple[Chunk, ...]]]
    values: Mapping[str, Storage]
    paths: Mapping[str, tuple[str | int, ...]]
    facts: Mapping[str, Any]


def read_dcp_metadata(directory: Path) -> DcpMetadata:
    """Read and check `.metadata`; a CheckpointError if it is damaged, or chunks do not cover their tensors."""
    file = directory / METADATA_FILE
    with ByteFile(file) as opened:
        data = bytes(opened.read(0, opened.nbytes))
    root = read_pickle(data, _NAMES, what=str(file))
    with damage_named(f"{file} does not describe a checkpoint", path=file, hint="it is damaged: copy it again"):
        return _facts(_fields(root, f"{_HOME}.Metadata"), directory)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, InertObject) or value.name != name:
        raise ValueError(f"expected a {name}, found a {getattr(value, 'name', type(value).__name__)}")
    state = value.state if value.state is not None else {}
    if not isinstance(state, Mapping):
        raise ValueError(f"expected fields in a {name}, found none")
    return state


def _facts(metadata: Mapping[str, Any], directory: Path) -> DcpMetadata:
    places: dict[tuple[str, tuple[int, ...] | None], Storage] = {}
    for index, stored in (metadata.get("storage_data") or {}).items():
        fields = _fields(index, f"{_HOME}.MetadataIndex")
        offset = fields.get("offset")
        places[fields["fqn"], None if offset is None else _sizes(offset)] = _item(stored, directory)
    tensors: dict[str, tuple[TensorInfo, tuple[Chunk, ...]]] = {}
    values: dict[str, Storage] = {}
    for key, entry in metadata["state_dict_metadata"].items():
        if not isinstance(key, str):
            raise ValueError(f"expected string keys, found {key!r}")
        if isinstance(entry, InertObject) and entry.name == _BYTES:
            values[key] = places[key, None]
        else:
            tensors[key] = _tensor(key, _fields(entry, _TENSOR), places)
    # An entry that was saved under several keys is there once.
    check_apart(set(values.values()), "values")
    return DcpMetadata(tensors, values, _paths(metadata.get("planner_data")), _known(metadata, places))


def _known(metadata: Mapping[str, Any], places: Mapping[Any, Storage]) -> dict[str, Any]:
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


def _item(stored: Any, directory: Path) -> Storage:
    fields = _fields(stored, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name, offset, nbytes = fields["relative_path"], fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name!r} is transformed by {fields['transform_descriptors']}, which only torch can undo")
    if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"expected a file of the directory, found {name!r}")
    if not (type(offset) is int and type(nbytes) is int and offset >= 0 and nbytes >= 0):
        raise ValueError(f"{name!r} has no bytes [{offset!r}, +{nbytes!r})")
    return Storage(directory / name, offset, nbytes)


def _sizes(sizes: Any) -> tuple[int, ...]:
    if (
        not isinstance(sizes, (tuple, list))
        or len(sizes) > MAX_DIMS
        or not all(type(size) is int and 0 <= size < 2**62 for size in sizes)
    ):
        raise ValueError(f"expected sizes, found {str(sizes)[:_SHOWN]}")
    return tuple(sizes)


def _tensor(
    key: str, fields: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...] | None], Storage]
) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    properties = fields["properties"]
    if not isinstance(properties, InertObject):
        raise ValueError(f"{key!r} has no properties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {key!r} is {dtype!r}")
    shape = _sizes(fields["size"])
    boxes: dict[Box, Storage] = {}
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
            raise ValueError(f"{key!r} has {len(boxes):,} chunks that lie beside each other, which are too many")
        yield from ((each, box) for each in open_boxes)
        open_boxes.append(box)


# The tensors, and the tree that they are in


# What accelerate calls the sharded model and optimizer of FSDP.
ACCELERATE_DIRECTORIES: Final = ("pytorch_model_fsdp_0", "optimizer_0")
_TOPS: Final = (*MODEL_KEYS, *OPTIMIZER_KEYS, "extra")


def is_dcp(path: Path) -> bool:
    """Return whether the path is a directory of torch.distributed.checkpoint."""
    return (path / METADATA_FILE).is_file()


def open_dcp(*paths: AnyPath, prefix: str | None = None) -> StoredSource:
    """Open a directory that `torch.distributed.checkpoint.save` wrote, from `ShardedTensor`s, `DTensor`s or tensors.

    Chunks may be boxes of any shape. No process group is needed, no code of the files is run, and tensors are read
    by ranges; extra memory: the structure, and a few chunks of 8 MiB.

    Args:
        paths: the directory, or several that belong together, such as one of the model and one of the optimizer.
        prefix: the keys above the model and the optimizer, if there are some; see `open_source`.

    Raises:
        CheckpointError: if a file is missing, damaged, or holds what a checkpoint may not hold.
    """
    directories = [Path(path) for path in paths]
    found = [read_dcp_metadata(path) for path in directories]
    root = together(directories, list(map(_tree, found, directories)))
    facts = {key: value for metadata in found for key, value in metadata.facts.items()}
    tensors, values = arranged(root, directories[0], prefix)
    return StoredSource("dcp", tensors, values, facts)


@final
@attrs.frozen
class ChunkedTensor(Stored):
    """A tensor in boxes, each in an archive of its own; `opened` are those that were looked into."""

    key: str
    chunks: tuple[Chunk, ...]
    opened: dict[Storage, StridedTensor] = attrs.field(factory=dict, eq=False, repr=False)

    def read(self, span: Span) -> Iterator[torch.Tensor]:
        """Return the elements `span`, of the boxes that have some of them."""
        return read_boxes(self.info, span, self._read_box)

    def storages(self) -> Iterator[Storage]:
        """Return the storage of each box."""
        return (self._stored(chunk).storage for chunk in self.chunks)

    def _read_box(self, box: Box, out: torch.Tensor) -> None:
        for chunk in self.chunks:
            common = chunk.box.overlap(box)
            if common.numel:
                place = common.relative_to(box.offsets).of(out)
                self._stored(chunk).read_box(common.relative_to(chunk.box.offsets), place)

    def _stored(self, chunk: Chunk) -> StridedTensor:
        """Return the tensor that a chunk was saved as."""
        item = chunk.item
        if item not in self.opened:
            what = f"the chunk of {self.key!r} at byte {item.start} of {item.file}"
            found = open_archive(item.file, start=item.start, nbytes=item.nbytes, what=what).root
            expected = TensorInfo(chunk.box.sizes, self.info.dtype)
            if not isinstance(found, StridedTensor) or found.info != expected or found.conjugated or found.negated:
                raise CheckpointError(
                    f"{what} should be a tensor of shape {chunk.box.sizes} and {self.info.dtype}, and is "
                    f"{getattr(found, 'info', type(found).__name__)}",
                    path=item.file,
                    fqn=self.key,
                )
            self.opened[item] = found
        return self.opened[item]


def _tree(metadata: DcpMetadata, directory: Path) -> dict[str, Any]:
    tree = _Tree(directory, len(metadata.tensors) + len(metadata.values))
    for key, (info, chunks) in metadata.tensors.items():
        tree.put(_path_of(key, metadata), ChunkedTensor(info, key, chunks))
    opened: dict[Storage, Any] = {}
    for key, item in metadata.values.items():
        if item not in opened:
            what = f"{key!r} at byte {item.start} of {item.file}"
            opened[item] = open_archive(item.file, start=item.start, nbytes=item.nbytes, what=what).root
        tree.put(_path_of(key, metadata), opened[item])
    return tree.root


def _path_of(key: str, metadata: DcpMetadata) -> tuple[str | int, ...]:
    if metadata.paths.get(key):
        return metadata.paths[key]
    top, _, rest = key.partition(".")
    return (top, rest) if rest and top in _TOPS else (key,)


@final
class _Tree:
    """Dictionaries and lists, made of the paths of their leaves, which come in any order."""

    def __init__(self, directory: Path, entries: int) -> None:
        self.root: dict[str, Any] = {}
        self._directory = directory
        # A list can begin with its last item, so it may have holes: those that the entries can fill, and more.
        self._holes = 10_000 + 16 * entries

    def put(self, path: tuple[str | int, ...], value: Any) -> None:
        """Put a leaf at its path."""
        place: Any = self.root
        for part, following in zip(path, (*path[1:], None), strict=True):
            new = value if following is None else [] if type(following) is int else {}
            if isinstance(place, list) and type(part) is int and 0 <= part <= len(place) + self._holes:
                self._holes -= max(0, part - len(place))
                place.extend([None] * (part + 1 - len(place)))
                is_there = place[part] is not None
            elif isinstance(place, dict):
                is_there = part in place
            else:
                raise self._contradiction(path)
            if not is_there:
                place[part] = new
            elif following is None:
                raise self._contradiction(path)
            place = place[part]

    def _contradiction(self, path: tuple[str | int, ...]) -> CheckpointError:
        return CheckpointError(f"{self._directory}: the paths of its entries contradict each other at {path}")
