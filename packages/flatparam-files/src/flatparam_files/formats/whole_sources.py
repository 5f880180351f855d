"""A checkpoint of any format as a source over stored tensors, and what is made of one: parts, casts, a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_core import Span, warn_caller
from flatparam_files.checkpoint.reader import CheckpointReader
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source, TensorInfo, chunk_spans, join_path, split_path
from flatparam_files.formats.stored_tensors import Storage, Stored


@final
@attrs.frozen(eq=False)
class StoredSource:
    """A `Source` whose tensors can each be read by themselves; `reader` is set for a checkpoint of ours."""

    format: str
    stored: Mapping[str, Stored]
    values: Mapping[str, Any]
    facts: Mapping[str, Any]
    reader: CheckpointReader | None = None
    tensors: Mapping[str, TensorInfo] = attrs.field(init=False)

    @tensors.default
    def _infos(self) -> dict[str, TensorInfo]:
        return {path: stored.info for path, stored in self.stored.items()}

    def read(self, path: str, span: Span) -> Iterator[Tensor]:
        """The elements `span` of a tensor. Extra memory: a few chunks, also if the stored tensor is not contiguous."""
        return self.stored[path].read(span)

    def aliases(self) -> dict[str, str]:
        """Tensors that are another one before them (tied weights), as far as the format tells: path by path."""
        first: dict[Stored, str] = {}
        known = {path: first.setdefault(stored, path) for path, stored in self.stored.items() if stored.info.numel}
        return {path: to for path, to in known.items() if to != path}

    def map_tensors(self, change: Callable[[str, Stored], Stored]) -> StoredSource:
        """Return the same with `change(path, stored)` in place of each tensor."""
        return attrs.evolve(self, stored={path: change(path, each) for path, each in self.stored.items()})


@final
@attrs.frozen(eq=False)
class _TensorOfSource(Stored):
    """A tensor of a different source."""

    source: Source
    path: str

    def read(self, span: Span) -> Iterator[Tensor]:
        return self.source.read(self.path, span)


def stored_source(source: Source) -> StoredSource:
    """Any source as one over stored tensors; a checkpoint of ours has its tied tensors under all their names."""
    if isinstance(source, StoredSource):
        return source
    stored: dict[str, Stored] = {path: _TensorOfSource(info, source, path) for path, info in source.tensors.items()}
    reader = source if isinstance(source, CheckpointReader) else None
    if reader is not None:
        stored |= {alias: stored[path] for alias, path in reader.manifest.aliases.items()}
    return StoredSource(source.format, stored, source.values, source.facts, reader)


def select(source: Source, parts: Sequence[str]) -> StoredSource:
    """Return the parts of a source that are named: `"model"`, `"optimizer"`, `"extra"`."""
    whole = stored_source(source)
    return attrs.evolve(
        whole,
        stored={path: each for path, each in whole.stored.items() if split_path(path)[0] in parts},
        values={part: value for part, value in whole.values.items() if part in parts},
    )


def averages_as_model(source: Source, name: str = "") -> StoredSource:
    """Return the averages of a model that a checkpoint of ours has, as if they were the model, without everything else.

    Args:
        name: of these averages, if there are several by name.

    Raises:
        CheckpointError: if there are none.
    """
    at = ("averages", name, "model") if name else ("averages", "model")
    whole = stored_source(source)
    parts = {path: split_path(path) for path in whole.stored}
    stored = {join_path(("model", p[-1])): whole.stored[path] for path, p in parts.items() if p[:-1] == at}
    if not stored:
        known = sorted({p[1] for p in parts.values() if p[0] == "averages" and len(p) == 4})
        raise CheckpointError(
            f"the checkpoint has no averages {name!r}" if name else "the checkpoint has no averages without a name",
            hint=f"it has those named {', '.join(map(repr, known))}" if known else "save them: Checkpointer(averages=)",
        )
    return attrs.evolve(whole, stored=stored, values={"model": {}})


@attrs.frozen
class _Derived(Stored):
    """A tensor that is read by reading another one."""

    stored: Stored

    def storages(self) -> Iterator[Storage]:
        return self.stored.storages()


@final
@attrs.frozen
class _Cast(_Derived):
    """A tensor in a different dtype."""

    path: str

    def read(self, span: Span) -> Iterator[Tensor]:
        for piece in chunk_spans(span, max(self.info.dtype.itemsize, self.stored.info.dtype.itemsize)):
            for chunk in self.stored.read(piece):
                cast = chunk.to(self.info.dtype)
                # In short parts, as float64: not every dtype can be asked itself.
                parts = zip(torch.split(cast, 1 << 16), torch.split(chunk, 1 << 16), strict=True)
                if any((one.double().isfinite() != other.double().isfinite()).any() for one, other in parts):
                    warn_caller(f"{self.path!r} has elements that are finite, and too large for {self.info.dtype}")
                yield cast


def cast_model(source: Source, dtype: torch.dtype) -> StoredSource:
    """Return the same with the floating-point tensors of the model in `dtype`; the optimizer's state stays as it is.

    A tensor with finite elements that `dtype` cannot hold is warned about when it is read.

    Raises:
        CheckpointError: if `dtype` is not one of floating-point numbers.
    """
    if not dtype.is_floating_point:
        raise CheckpointError(f"a model cannot be cast to {dtype}", hint="give a dtype of floating-point numbers")

    def cast(path: str, stored: Stored) -> Stored:
        is_cast = path.startswith("model/") and stored.info.dtype.is_floating_point
        return _Cast(TensorInfo(stored.info.shape, dtype), stored, path) if is_cast else stored

    return stored_source(source).map_tensors(cast)


@final
@attrs.frozen
class _Watched(_Derived):
    """A tensor that tells an observer what is read of it."""

    observe: Callable[[int], object]

    def read(self, span: Span) -> Iterator[Tensor]:
        for chunk in self.stored.read(span):
            yield chunk
            self.observe(chunk.nbytes)


def watch(source: Source, observe: Callable[[int], object]) -> StoredSource:
    """Return the same; `observe` is called with the bytes of each chunk once it was used."""
    return stored_source(source).map_tensors(lambda _, stored: _Watched(stored.info, stored, observe))


def tree_of(source: Source) -> dict[str, Any]:
    """Return the tree of a source: its values, with a `Stored` in the place of each tensor."""
    tree: dict[str, Any] = _copied(source.values)
    for path, stored in stored_source(source).stored.items():
        *parents, name = split_path(path)
        place: Any = tree
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(name) if isinstance(place, list) else name] = stored
    return tree


def _copied(values: Any) -> Any:
    """Return the same, with the tuples that hold containers as lists, so that tensors can be put in their places."""
    if isinstance(values, Mapping) and not isinstance(values, Counter):
        return {key: _copied(value) for key, value in values.items()}
    if type(values) not in (list, tuple):
        return values
    copied = [_copied(value) for value in values]
    has_places = any(isinstance(each, (list, dict, type(None))) for each in copied)
    return copied if has_places else type(values)(copied)
