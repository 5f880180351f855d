"""Safetensors as Hugging Face libraries keep them: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar, cast

from flatparam_core import Span
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import parse_json
from flatparam_files.disk.safetensors import SafetensorsHeader, TensorFileWriter, read_header
from flatparam_files.disk.source import Source, TensorInfo, join_path, split_path
from flatparam_files.disk.system import AnyPath, ByteFile
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.stored_tensors import Storage, Stored, StridedTensor, row_major
from flatparam_files.formats.whole_sources import StoredSource, select

T = TypeVar("T", bound="HasInfo")
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
        # In the order of transformers, which leaves an older index where it writes one file.
        path = next((path / name for name in (SINGLE_FILE, INDEX_FILE) if (path / name).is_file()), path / SINGLE_FILE)
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
    source: Source, path: AnyPath, *, max_shard_nbytes: int = MAX_SHARD_NBYTES, dry_run: bool = False
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
    """Return the tensors to write, by name, in the order of the source."""
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
        raise CheckpointError(f"expected a model for {path}, found none", path=path, hint="use torch or dcp")
    tied = opened.aliases()
    return {split_path(each)[-1]: stored for each, stored in opened.stored.items() if each not in tied}


def divided(tensors: Mapping[str, T], max_nbytes: int = MAX_SHARD_NBYTES) -> dict[str, dict[str, T]]:
    """Return the tensors of each file, by its name: at most `max_nbytes` bytes of them, or one tensor."""
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
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


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
    with SparseFile(path) as file, TensorFileWriter(cast("BinaryIO", file), infos, {"format": "pt"}) as writer:
        for name, stored in order:
            writer.write(name, stored.read(Span(0, stored.info.numel)))


# The index of a model in several files, as Hugging Face libraries keep it beside them


class HasInfo(Protocol):
    """A tensor that is, or will be, in a file."""

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""


def read_shards(index: Path, read_file: Callable[[Path], Mapping[str, Stored]]) -> dict[str, Stored]:
    """Return the tensors that an index names, in its order; `read_file` opens one of the files.

    Raises:
        CheckpointError: if the index is none, or does not agree with the files.
    """
    weights = _weight_map(index)
    files = {name: read_file(index.with_name(name)) for name in sorted(set(weights.values()))}
    for tensor, name in weights.items():
        if tensor not in files[name]:
            raise CheckpointError(f"{index} says that {tensor!r} is in {name}, and it is not", path=index, fqn=tensor)
    return {tensor: files[name][tensor] for tensor, name in weights.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file names by tensor."""
    with ByteFile(index) as file:
        data = bytes(file.read(0, file.nbytes))
    try:
        tree = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{index}: expected JSON, found {error}", path=index) from error
    weights = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index} has no 'weight_map', as the index of a model's files has", path=index)
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(f"{index}: {tensor!r} is in {name!r}, which is not a file beside it", path=index)
    return weights


def encode_index(files: Mapping[str, Mapping[str, HasInfo]]) -> bytes:
    """Return the index of tensors that lie in several files; `files` has them by file and name."""
    total = sum(stored.info.nbytes for tensors in files.values() for stored in tensors.values())
    weights = {tensor: name for name, tensors in files.items() for tensor in tensors}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(tree, indent=2) + "\n").encode()
