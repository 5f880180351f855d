"""The files of a model, with its tensors under the names that the model has for them."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs
from torch import nn
from typing_extensions import Self

from flatparam_checkpoint.pretrained.unread import UnreadTensor
from flatparam_files import CheckpointError, TensorInfo, join_path, open_source, select, split_path
from flatparam_files.disk.source import renamed
from flatparam_files.disk.system import bytes_of, bytes_view
from flatparam_files.formats.stored_tensors import Stored, StridedTensor
from flatparam_files.formats.whole_sources import StoredSource
from flatparam_runtime import Span
from flatparam_state.model_tensors import ModelTensor, model_tensors

Names: TypeAlias = Mapping[str, str] | Callable[[str], str | None]
"""From a tensor's name in the files to its name in the model; None, or an absent key of a mapping, keeps the name."""

_SAMPLED: Final = 32
"""The elements at each of three places of a tensor that tell whether it is the same on two ranks."""
_MOST_FILES: Final = 10_000
"""In a folder, that are looked at to tell whether ranks have the same."""


@final
@attrs.frozen(eq=False)
class PretrainedFiles:
    """The tensors of a model in files, by their names in the model."""

    path: Path
    source: StoredSource
    paths: Mapping[str, str]
    """The path of each tensor in the source."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], names: Names | None = None) -> Self:
        """Open safetensors (one file, several with an index), `pytorch_model.bin`, a directory of DCP or one of ours.

        Only headers are read. Checksums of `torch.save` are not compared later, because every rank would have to read
        all bytes of a tensor for that.

        Args:
            names: what the tensors are called in the model, if not as in the files.

        Raises:
            CheckpointError: if there is nothing that is known, something damaged, or two tensors with one name.
        """
        source = select(open_source(path), ["model"]).map_tensors(lambda _, stored: _unchecked(stored))
        if not source.tensors:
            raise CheckpointError(f"{path} has no tensors of a model", path=Path(path), hint="check the path")
        paths: dict[str, str] = {}
        for each in source.tensors:
            name = renamed(".".join(split_path(each)[1:]), names)
            if name in paths:
                raise CheckpointError(
                    f"{path}: the names of {paths[name]!r} and of {each!r} both become {name!r}",
                    path=Path(path),
                    fqn=name,
                )
            paths[name] = each
        return cls(Path(path), source, paths)

    @property
    def stamp(self) -> object:
        """Equal on two ranks only if they have the same files; None if nobody can tell without reading them.

        They may be the same files nevertheless: copies on the disks of hosts.
        """
        save_id = self.source.facts.get("save_id")
        if save_id is not None:
            return save_id
        root = self.path.resolve()
        # An index names files beside it.
        inside = root.parent.iterdir() if root.suffix == ".json" else [root] if root.is_file() else root.rglob("*")
        files = sorted(itertools.islice(inside, _MOST_FILES + 1))
        if len(files) > _MOST_FILES:
            return None
        found = [(str(each.relative_to(root.parent)), each.stat()) for each in files]
        return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]

    def samples(self) -> str:
        """Return a digest of some elements of each tensor: its first, middle and last ones.

        Raises:
            CheckpointError: if they cannot be read.
        """
        digest = hashlib.sha256()
        for path, info in sorted(self.source.tensors.items(), key=lambda entry: entry[0]):
            numel = info.numel
            for start in dict.fromkeys((0, max(0, numel // 2 - _SAMPLED), max(0, numel - _SAMPLED))):
                for chunk in self.source.read(path, Span(start, min(numel, start + _SAMPLED))):
                    digest.update(bytes_of(bytes_view(chunk)))
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors; of tied ones, once if the format tells."""
        aliases = self.source.aliases()
        return sum(info.nbytes for path, info in self.source.tensors.items() if path not in aliases)

    def info(self, name: str) -> TensorInfo:
        """Return the shape and dtype of the tensor that the model calls `name`."""
        return self.source.tensors[self.paths[name]]

    def unread(self, name: str) -> UnreadTensor:
        """Return the tensor that the model calls `name`, for functions that make others of it."""
        return UnreadTensor(self.source.stored[self.paths[name]])

    def with_tensors(self, made: Mapping[str, UnreadTensor], used: Collection[str]) -> Self:
        """Return the same files with the tensors `made`, by their names in the model, in place of the names `used`."""
        paths = {name: path for name, path in self.paths.items() if name not in used}
        new = {name: join_path(("model", name)) for name in made}
        stored = {path: self.source.stored[path] for path in paths.values()}
        stored |= {new[name]: tensor.stored for name, tensor in made.items()}
        return type(self)(self.path, attrs.evolve(self.source, stored=stored), paths | new)

    def found(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are there."""
        return [name for name in names if name in self.paths]

    def different(self, names: Sequence[str]) -> Sequence[str]:
        """Those of `names`, which are there, that the format does not tell to be another one of them (tied weights)."""
        if len(names) == 1:
            return names
        aliases = self.source.aliases()
        by_tensor: dict[str, str] = {}
        for name in names:
            path = self.paths[name]
            by_tensor.setdefault(aliases.get(path, path), name)
        return [*by_tensor.values()]


def _unchecked(stored: Stored) -> Stored:
    if isinstance(stored, StridedTensor) and stored.storage.crc:
        return attrs.evolve(stored, storage=attrs.evolve(stored.storage, crc=0))
    return stored


# How they fit a model: names, shapes and dtypes, before anything is read


@final
@attrs.frozen
class Fit:
    """How the files of a model fit it, by the names of the model."""

    missing: tuple[str, ...]
    """Names that the model has and the files lack, under each of its names if it is tied."""
    unexpected: tuple[str, ...]
    """Names that the files have and the model lacks."""
    mismatched: tuple[str, ...]
    """For each tensor that cannot be read into the model, what was expected and what was found."""
    tied: Mapping[str, str]
    """The names of tied parameters that the files lack, and the name under which they have them."""


def fit(model: nn.Module, files: PretrainedFiles) -> Fit:
    """Compare the parameters and persistent buffers of `model`, sharded or not, on any device, with `files`."""
    missing, mismatched, used, tied = [], [], set(), {}
    for tensor in model_tensors(model):
        found = files.found(tensor.names)
        used.update(found)
        if not found:
            missing.append(tensor.name)
            continue
        tied.update({name: found[0] for name in tensor.names if name not in found})
        for name in found:
            problem = _problem(name, tensor, files.info(name))
            if problem:
                mismatched.append(problem)
    unexpected = [name for name in files.paths if name not in used]
    return Fit(tuple(missing), tuple(unexpected), tuple(mismatched), tied)


def _problem(name: str, wanted: ModelTensor, found: TensorInfo) -> str:
    if wanted.shape != found.shape:
        return f"{name!r}: expected shape {wanted.shape}, found {found.shape}"
    if found.dtype != wanted.dtype and not (found.dtype.is_floating_point and wanted.dtype.is_floating_point):
        return f"{name!r}: expected {wanted.dtype}, found {found.dtype}, which is not cast to it"
    return ""
