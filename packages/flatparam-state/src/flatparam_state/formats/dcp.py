"""Directories of torch.distributed.checkpoint: what sharded state of FSDP1 and FSDP2 is saved to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.byte_file import ByteFile
from flatparam_state.errors import CheckpointError
from flatparam_state.formats.archive import open_archive
from flatparam_state.formats.dcp_metadata import METADATA_FILE, Chunk, DcpMetadata, Item, read_dcp_metadata
from flatparam_state.formats.regions import Box, Storage, StridedTensor, boxes_of, read_box
from flatparam_state.formats.trees import MODEL_KEYS, OPTIMIZER_KEYS, TreeSource, arranged
from flatparam_state.source import Source, TensorInfo, chunk_spans

__all__ = ["ACCELERATE_DIRECTORIES", "ChunkedTensor", "is_dcp", "open_dcp", "open_dcps"]

# What accelerate calls the sharded model and optimizer of FSDP.
ACCELERATE_DIRECTORIES: Final = ("pytorch_model_fsdp_0", "optimizer_0")
_TOPS: Final = (*MODEL_KEYS, *OPTIMIZER_KEYS, "extra")


def is_dcp(path: Path) -> bool:
    """Whether the path is a directory of torch.distributed.checkpoint."""
    return (path / METADATA_FILE).is_file()


def open_dcp(path: str | os.PathLike[str]) -> Source:
    """Open a directory that `torch.distributed.checkpoint.save` wrote, from `ShardedTensor`s, `DTensor`s or tensors.

    Chunks may be boxes of any shape. No process group is needed, no code of the files is run, and tensors are read
    by ranges; extra memory: the structure, and a few chunks of 8 MiB.

    Raises:
        CheckpointError: where a file is missing, damaged, or holds what a checkpoint may not hold.
    """
    return open_dcps([Path(path)])


def open_dcps(paths: Sequence[Path]) -> Source:
    """Open directories that belong together, such as one of the model and one of the optimizer; see `open_dcp`."""
    root: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for path in paths:
        metadata = read_dcp_metadata(path)
        for key, value in _tree(metadata, path).items():
            if key in root:
                raise CheckpointError(
                    f"{path} has {key!r}, and so has another of {', '.join(map(str, paths))}"
                )
            root[key] = value
        facts.update(metadata.facts)
    tensors, values = arranged(root, paths[0], (ChunkedTensor, StridedTensor))
    return TreeSource("dcp", tensors, values, facts)


@final
@attrs.frozen
class ChunkedTensor:
    """A tensor in boxes, each in an archive of its own; `opened` are those that were looked into."""

    key: str
    info: TensorInfo
    chunks: tuple[Chunk, ...]
    opened: dict[Item, StridedTensor] = attrs.field(factory=dict, eq=False, repr=False)

    def read(self, span: Span) -> Iterator[torch.Tensor]:
        """The row-major elements `span`, as 1-D tensors of at most `CHUNK_NBYTES`."""
        with ExitStack() as files:
            reader = _Reader(self, files)
            for piece in chunk_spans(span, self.info.dtype.itemsize):
                out = torch.empty(piece.numel, dtype=self.info.dtype)
                at = 0
                for box in boxes_of(piece, self.info.shape):
                    reader.read(box, out[at : at + box.numel].view(box.sizes))
                    at += box.numel
                yield out

    def storages(self) -> Iterator[Storage]:
        """What it lies in."""
        with ExitStack() as files:
            reader = _Reader(self, files)
            for chunk in self.chunks:
                yield reader.stored_in(chunk).storage


@final
class _Reader:
    """Reads boxes of one tensor; what it opens is closed by `files`."""

    def __init__(self, tensor: ChunkedTensor, files: ExitStack) -> None:
        self._tensor = tensor
        self._stack = files
        self._files: dict[Path, ByteFile] = {}

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Read the elements `box` into `out`, of the sizes of the box."""
        for chunk in self._tensor.chunks:
            common = chunk.box.overlap(box)
            if not common.numel:
                continue
            place = out
            for dim, begin in enumerate(common.relative_to(box.start).start):
                place = place.narrow(dim, begin, common.sizes[dim])
            stored, file = self.stored_in(chunk), self._file(chunk.item.file)
            stored.storage.check(file)
            read_box(file, stored, common.relative_to(chunk.box.start), place)

    def stored_in(self, chunk: Chunk) -> StridedTensor:
        """What a chunk was saved as."""
        opened = self._tensor.opened
        if chunk.item not in opened:
            opened[chunk.item] = self._open(chunk)
        return opened[chunk.item]

    def _open(self, chunk: Chunk) -> StridedTensor:
        item, info = chunk.item, self._tensor.info
        what = f"the chunk of {self._tensor.key!r} at byte {item.offset} of {item.file}"
        stored = open_archive(item.file, start=item.offset, nbytes=item.nbytes, what=what).root
        if (
            not isinstance(stored, StridedTensor)
            or stored.conjugated
            or stored.negated
            or stored.info != TensorInfo(chunk.box.sizes, info.dtype)
        ):
            raise CheckpointError(
                f"{what} should be a tensor of shape {chunk.box.sizes} and {info.dtype}, and is "
                f"{getattr(stored, 'info', type(stored).__name__)}",
                path=item.file,
                fqn=self._tensor.key,
            )
        return stored

    def _file(self, path: Path) -> ByteFile:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(ByteFile(path))
        return self._files[path]


def _tree(metadata: DcpMetadata, directory: Path) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, (info, chunks) in metadata.tensors.items():
        _put(root, _path_of(key, metadata), ChunkedTensor(key, info, chunks), directory)
    for key, item in metadata.values.items():
        what = f"{key!r} at byte {item.offset} of {item.file}"
        value = open_archive(item.file, start=item.offset, nbytes=item.nbytes, what=what).root
        _put(root, _path_of(key, metadata), value, directory)
    return root


def _path_of(key: str, metadata: DcpMetadata) -> tuple[str | int, ...]:
    if metadata.paths.get(key):
        return metadata.paths[key]
    top, _, rest = key.partition(".")
    return (top, rest) if rest and top in _TOPS else (key,)


def _put(root: dict[str, Any], path: tuple[str | int, ...], value: Any, directory: Path) -> None:
    place: Any = root
    for part, following in zip(path, (*path[1:], None), strict=True):
        new = value if following is None else [] if type(following) is int else {}
        if isinstance(place, list) and type(part) is int and 0 <= part <= len(place) + 10_000:
            place.extend([None] * (part + 1 - len(place)))
            if place[part] is None or following is None:
                place[part] = new
        elif isinstance(place, dict):
            place.setdefault(part, new)
        else:
            raise CheckpointError(f"{directory}: the paths of its entries contradict each other at {path}")
        place = place[part]
