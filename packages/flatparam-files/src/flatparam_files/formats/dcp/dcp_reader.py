"""Directories of torch.distributed.checkpoint: what sharded state of FSDP1 and FSDP2 is saved to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from flatparam_core import Box, Span
from flatparam_files.disk import AnyPath, CheckpointError, TensorInfo
from flatparam_files.formats.dcp.dcp_metadata import (
    METADATA_FILE,
    Chunk,
    DcpMetadata,
    Item,
    read_dcp_metadata,
)
from flatparam_files.formats.stored import (
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    Storage,
    Stored,
    StoredSource,
    StridedTensor,
    arranged,
    read_boxes,
)
from flatparam_files.formats.torch_archive import open_archive

__all__ = ["ACCELERATE_DIRECTORIES", "is_dcp", "open_dcp"]

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
    root: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for path in directories:
        metadata = read_dcp_metadata(path)
        for key, value in _tree(metadata, path).items():
            if key in root:
                raise CheckpointError(
                    f"{path} has {key!r}, and so has another of {', '.join(map(str, directories))}"
                )
            root[key] = value
        facts.update(metadata.facts)
    tensors, values = arranged(root, directories[0], prefix)
    return StoredSource("dcp", tensors, values, facts)


@final
@attrs.frozen
class ChunkedTensor(Stored):
    """A tensor in boxes, each in an archive of its own; `opened` are those that were looked into."""

    key: str
    chunks: tuple[Chunk, ...]
    opened: dict[Item, StridedTensor] = attrs.field(factory=dict, eq=False, repr=False)

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
            what = f"the chunk of {self.key!r} at byte {item.offset} of {item.file}"
            found = open_archive(item.file, start=item.offset, nbytes=item.nbytes, what=what).root
            expected = TensorInfo(chunk.box.sizes, self.info.dtype)
            if (
                not isinstance(found, StridedTensor)
                or found.info != expected
                or found.conjugated
                or found.negated
            ):
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
    opened: dict[Item, Any] = {}
    for key, item in metadata.values.items():
        if item not in opened:
            what = f"{key!r} at byte {item.offset} of {item.file}"
            opened[item] = open_archive(item.file, start=item.offset, nbytes=item.nbytes, what=what).root
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
