"""Safetensors as Hugging Face libraries keep them: one file, or shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, cast

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.byte_file import ByteFile, tensor_of
from flatparam_state.errors import CheckpointError
from flatparam_state.formats.output import SparseFile, appearing, refuse_existing
from flatparam_state.formats.regions import Storage
from flatparam_state.formats.trees import TreeSource
from flatparam_state.formats.views import aliases_of
from flatparam_state.limited_json import parse_json
from flatparam_state.source import Source, TensorInfo, chunk_spans, join_path, split_path
from flatparam_state.tensor_file import TensorFileWriter, read_header

__all__ = ["INDEX_FILE", "SINGLE_FILE", "open_hugging_face", "write_hugging_face"]

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


@final
@attrs.frozen
class _FileTensor:
    """The row-major bytes of a tensor, from byte `offset` of a file on."""

    info: TensorInfo
    file: Path
    offset: int

    def read(self, span: Span) -> Iterator[torch.Tensor]:
        """The row-major elements `span`, in pieces; see `Source.read`."""
        itemsize = self.info.dtype.itemsize
        with ByteFile(self.file) as file:
            for piece in chunk_spans(span, itemsize):
                data = file.read(self.offset + piece.start * itemsize, piece.numel * itemsize)
                yield tensor_of(data, self.info.dtype)

    def storages(self) -> Iterator[Storage]:
        """What it lies in."""
        yield Storage(self.file, self.offset, self.info.nbytes)


def open_hugging_face(path: str | os.PathLike[str]) -> Source:
    """Open a safetensors file, an index of several, or a directory that has either; the tensors are the model.

    Raises:
        CheckpointError: where a file is missing or damaged, or the index does not agree with the files.
    """
    path = Path(path)
    if path.is_dir():
        path = path / (INDEX_FILE if (path / INDEX_FILE).is_file() else SINGLE_FILE)
    if path.suffix != ".json":
        stored, metadata = _read_file(path)
        return TreeSource("safetensors", stored, {"model": {}}, {"metadata": metadata, "files": 1})
    weights = _read_index(path)
    found: dict[str, _FileTensor] = {}
    metadata = {}
    for file in sorted(set(weights.values())):
        tensors, metadata = _read_file(path.with_name(file))
        found.update(tensors)
    missing = sorted(name for name in weights if join_path(["model", name]) not in found)
    if missing:
        raise CheckpointError(
            f"{path} says that {missing[0]!r} is in {weights[missing[0]]}, and it is not",
            path=path,
            fqn=missing[0],
        )
    stored = {join_path(["model", name]): found[join_path(["model", name])] for name in weights}
    facts = {"metadata": metadata, "files": len(set(weights.values()))}
    return TreeSource("safetensors", stored, {"model": {}}, facts)


def _read_file(path: Path) -> tuple[dict[str, _FileTensor], Mapping[str, str]]:
    header = read_header(path)
    tensors = {
        join_path(["model", name]): _FileTensor(stored.info, path, stored.offset)
        for name, stored in header.tensors.items()
    }
    return tensors, header.metadata


def _read_index(path: Path) -> dict[str, str]:
    with ByteFile(path) as file:
        data = bytes(file.read(0, file.nbytes))
    try:
        tree = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}", path=path) from error
    weights = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{path} has no 'weight_map', as an index of safetensors files has", path=path)
    for name, file_name in weights.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{path}: {name!r} is in {file_name!r}, which is no file beside it", path=path
            )
    return weights


def _shards_of(source: Source, max_shard_nbytes: int) -> list[dict[str, TensorInfo]]:
    """Which tensors of the model go to which file, by path, in the order of the source.

    A file holds at most `max_shard_nbytes` bytes of tensors, or one tensor. A tensor that is another one (tied
    weights) is left out, as Hugging Face libraries do.
    """
    tied = aliases_of(source)
    shards: list[dict[str, TensorInfo]] = [{}]
    nbytes = 0
    for path, info in source.tensors.items():
        if not path.startswith("model/") or path in tied:
            continue
        if shards[-1] and nbytes + info.nbytes > max_shard_nbytes:
            shards.append({})
            nbytes = 0
        shards[-1][path] = info
        nbytes += info.nbytes
    return shards


def write_hugging_face(
    source: Source,
    path: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = 5 * 10**9,
    dry_run: bool = False,
) -> dict[str, int]:
    """Write the model of a source as safetensors with the names that `from_pretrained` looks for.

    Args:
        path: a new directory, or a new file where the name ends with `.safetensors` (then everything goes there).
        max_shard_nbytes: the most bytes of tensors in a file, unless a single tensor is larger.
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file.

    Extra memory: one chunk. Equal models become equal bytes.

    Raises:
        CheckpointError: where `path` exists, there is no model, or it holds what safetensors cannot.
    """
    path = Path(path)
    values = source.values.get("model") or {}
    if values:
        raise CheckpointError(
            f"the model holds {', '.join(map(repr, list(values)[:3]))}, which are no tensors, and safetensors hold "
            "nothing else",
            path=path,
            hint="export it to torch or dcp",
        )
    shards = _shards_of(source, max_shard_nbytes)
    if not shards[0]:
        raise CheckpointError(f"there is no model to write to {path}", path=path, hint="use torch or dcp")
    single = path.suffix == ".safetensors"
    if single:
        shards = [{name: info for shard in shards for name, info in shard.items()}]
    names = [path.name] if single else _file_names(len(shards))
    if dry_run:
        refuse_existing(path)
    else:
        with appearing(path) as temporary:
            _write(source, temporary, dict(zip(names, shards, strict=True)), single)
    return {
        name: sum(info.nbytes for info in shard.values()) for name, shard in zip(names, shards, strict=True)
    }


def _write(source: Source, path: Path, files: Mapping[str, Mapping[str, TensorInfo]], single: bool) -> None:
    if not single:
        path.mkdir()
    for name, shard in files.items():
        _write_file(source, path if single else path / name, shard)
    if len(files) > 1:
        with SparseFile(path / INDEX_FILE) as file:
            file.write(_index(files))


def _file_names(count: int) -> list[str]:
    """What `count` files of one model are called."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _name(path: str) -> str:
    return ".".join(split_path(path)[1:])


def _write_file(source: Source, path: Path, shard: Mapping[str, TensorInfo]) -> None:
    # Wide elements first: then each tensor begins at a multiple of its own itemsize.
    order = sorted(shard, key=lambda each: (-shard[each].dtype.itemsize, _name(each)))
    tensors = {_name(each): shard[each] for each in order}
    with (
        SparseFile(path) as file,
        TensorFileWriter(cast("BinaryIO", file), tensors, {"format": "pt"}) as writer,
    ):
        for each in order:
            writer.write(_name(each), source.read(each, Span(0, shard[each].numel)))


def _index(files: Mapping[str, Mapping[str, TensorInfo]]) -> bytes:
    total = sum(info.nbytes for shard in files.values() for info in shard.values())
    weights = {_name(path): name for name, shard in files.items() for path in shard}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(tree, indent=2) + "\n").encode()
