"""The index of a model in several files, as Hugging Face libraries keep it beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from flatparam_files.disk import ByteFile, CheckpointError, TensorInfo, parse_json
from flatparam_files.formats.stored import Stored

__all__ = ["HasInfo", "encode_index", "read_shards"]


class HasInfo(Protocol):
    """A tensor that is, or will be, in a file."""

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""
        ...


def read_shards(index: Path, read_file: Callable[[Path], Mapping[str, Stored]]) -> dict[str, Stored]:
    """The tensors that an index names, in its order; `read_file` opens one of the files.

    Raises:
        CheckpointError: if the index is none, or does not agree with the files.
    """
    weights = _weight_map(index)
    files = {name: read_file(index.with_name(name)) for name in sorted(set(weights.values()))}
    for tensor, name in weights.items():
        if tensor not in files[name]:
            raise CheckpointError(
                f"{index} says that {tensor!r} is in {name}, and it is not", path=index, fqn=tensor
            )
    return {tensor: files[name][tensor] for tensor, name in weights.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """The file names by tensor."""
    with ByteFile(index) as file:
        data = bytes(file.read(0, file.nbytes))
    try:
        tree = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{index} is no JSON: {error}", path=index) from error
    weights = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index} has no 'weight_map', as the index of a model's files has", path=index)
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(
                f"{index}: {tensor!r} is in {name!r}, which is no file beside it", path=index
            )
    return weights


def encode_index(files: Mapping[str, Mapping[str, HasInfo]]) -> bytes:
    """The index of tensors that lie in several files; `files` has them by file and name."""
    total = sum(stored.info.nbytes for tensors in files.values() for stored in tensors.values())
    weights = {tensor: name for name, tensors in files.items() for tensor in tensors}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(tree, indent=2) + "\n").encode()
