"""Safetensors as Hugging Face libraries keep them: one file, or shards with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

from flatparam_core import Span
from flatparam_files.disk import (
    AnyPath,
    CheckpointError,
    SafetensorsHeader,
    Source,
    TensorFileWriter,
    join_path,
    read_header,
    split_path,
)
from flatparam_files.formats.hugging_face.shard_index import HasInfo, encode_index, read_shards
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.stored import Storage, Stored, StoredSource, StridedTensor, row_major, select

__all__ = [
    "INDEX_FILE",
    "MAX_SHARD_NBYTES",
    "SINGLE_FILE",
    "divided",
    "open_hugging_face",
    "write_hugging_face",
]

T = TypeVar("T", bound=HasInfo)
MAX_SHARD_NBYTES: Final = 5 * 10**9
"""The most bytes of tensors in a file, unless told otherwise."""
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


def open_hugging_face(path: AnyPath) -> StoredSource:
    """Open a safetensors file, an index of several, or a directory that has either; the tensors are the model.

    Raises:
        CheckpointError: if a file is missing or damaged, or the index does not agree with the files.
    """
    path = Path(path)
    if path.is_dir():
        path = path / (INDEX_FILE if (path / INDEX_FILE).is_file() else SINGLE_FILE)
    headers: dict[Path, SafetensorsHeader] = {}

    def read_file(file: Path) -> dict[str, Stored]:
        headers[file] = read_header(file)
        return {
            name: StridedTensor(
                stored.info, Storage(file, stored.offset, stored.nbytes), 0, row_major(stored.info.shape)
            )
            for name, stored in headers[file].tensors.items()
        }

    tensors = read_shards(path, read_file) if path.suffix == ".json" else read_file(path)
    metadata = {key: value for header in headers.values() for key, value in header.metadata.items()}
    stored = {join_path(["model", name]): each for name, each in tensors.items()}
    return StoredSource("safetensors", stored, {"model": {}}, {"metadata": metadata, "files": len(headers)})


def write_hugging_face(
    source: Source,
    path: AnyPath,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    dry_run: bool = False,
) -> dict[str, int]:
    """Write the model of a source as safetensors with the names that `from_pretrained` looks for.

    A tensor that is another one (tied weights) is left out, as Hugging Face libraries do. Extra memory: one chunk.
    Equal models become equal bytes.

    Args:
        path: a new directory, or a new file if the name ends with `.safetensors` (then everything goes there).
        max_shard_nbytes: the most bytes of tensors in a file, unless a single tensor is larger.
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file.

    Raises:
        CheckpointError: if `path` exists, there is no model, or it holds what safetensors cannot.
    """
    path = Path(path)
    check_new(path)
    tensors = _model_of(source, path)
    if path.suffix == ".safetensors":
        files = {path.name: tensors}
    else:
        files = divided(tensors, max_shard_nbytes)
    if not dry_run:
        with appearing(path) as temporary:
            if path.name in files:
                _write_file(temporary, tensors)
            else:
                _write_directory(temporary, files)
    return {name: sum(each.info.nbytes for each in shard.values()) for name, shard in files.items()}


def _model_of(source: Source, path: Path) -> dict[str, Stored]:
    """The tensors to write, by name, in the order of the source."""
    opened = select(source, ["model"])
    values = opened.values.get("model") or {}
    if values:
        raise CheckpointError(
            f"the model holds {', '.join(map(repr, list(values)[:3]))}, which are no tensors, and safetensors hold "
            "nothing else",
            path=path,
            hint="export it to torch or dcp",
        )
    if not opened.stored:
        raise CheckpointError(f"there is no model to write to {path}", path=path, hint="use torch or dcp")
    tied = opened.aliases()
    return {split_path(each)[-1]: stored for each, stored in opened.stored.items() if each not in tied}


def divided(tensors: Mapping[str, T], max_nbytes: int = MAX_SHARD_NBYTES) -> dict[str, dict[str, T]]:
    """The tensors of each file, by its name: at most `max_nbytes` bytes of them, or one tensor."""
    shards: list[dict[str, T]] = [{}]
    nbytes = 0
    for name, stored in tensors.items():
        if shards[-1] and nbytes + stored.info.nbytes > max_nbytes:
            shards.append({})
            nbytes = 0
        shards[-1][name] = stored
        nbytes += stored.info.nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _write_directory(path: Path, files: Mapping[str, Mapping[str, Stored]]) -> None:
    path.mkdir()
    for name, tensors in files.items():
        _write_file(path / name, tensors)
    if len(files) > 1:
        with SparseFile(path / INDEX_FILE) as file:
            file.write(encode_index(files))


def _write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    # Wide elements first: then each tensor begins at a multiple of its own itemsize.
    order = sorted(tensors.items(), key=lambda item: (-item[1].info.dtype.itemsize, item[0]))
    infos = {name: stored.info for name, stored in order}
    with (
        SparseFile(path) as file,
        TensorFileWriter(cast("BinaryIO", file), infos, {"format": "pt"}) as writer,
    ):
        for name, stored in order:
            writer.write(name, stored.read(Span(0, stored.info.numel)))
