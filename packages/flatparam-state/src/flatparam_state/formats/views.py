"""Sources over another source: parts of it, its model in another dtype, and one that is watched while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from typing_extensions import final

from flatparam_runtime import Span
from flatparam_state.checkpoint import CheckpointReader
from flatparam_state.errors import CheckpointError
from flatparam_state.formats.archive_writer import Streamed
from flatparam_state.formats.regions import boxes_of
from flatparam_state.formats.trees import TreeSource
from flatparam_state.source import Source, TensorInfo, chunk_spans, split_path

__all__ = ["Own", "aliases_of", "cast_model", "select", "tree_of", "watch"]


@attrs.frozen(eq=False)
class _View:
    """The same source; its subclasses change some of it."""

    source: Source

    @property
    def format(self) -> str:
        """See `Source`."""
        return self.source.format

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        return self.source.tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self.source.values

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self.source.facts

    def read(self, path: str, span: Span) -> Iterator[torch.Tensor]:
        """See `Source`."""
        return self.source.read(path, span)


@final
@attrs.frozen(eq=False)
class Own:
    """A checkpoint directory of ours, with its tied tensors under all their names.

    Extra memory: a chunk; a tensor that is stored in another order than row-major is held once while it is read.
    """

    reader: CheckpointReader

    @property
    def format(self) -> str:
        """See `Source`."""
        return self.reader.format

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        tied = {alias: self.reader.tensors[path] for alias, path in self.reader.manifest.aliases.items()}
        return {**self.reader.tensors, **tied}

    @property
    def values(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self.reader.values

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self.reader.facts

    def read(self, path: str, span: Span) -> Iterator[torch.Tensor]:
        """See `Source`."""
        record = self.reader.record(path)
        if record.stride is None:
            yield from self.reader.read(path, span)
            return
        info = record.info
        stored = torch.empty(info.numel, dtype=info.dtype)
        at = 0
        for chunk in self.reader.read_stored(path, Span(0, info.numel)):
            stored[at : at + chunk.numel()] = chunk
            at += chunk.numel()
        elements = stored.as_strided(info.shape, record.stride)
        for piece in chunk_spans(span, info.dtype.itemsize):
            yield torch.cat([_box(elements, box.start, box.sizes) for box in boxes_of(piece, info.shape)])


def _box(elements: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(start, sizes, strict=True)):
        elements = elements.narrow(dim, begin, size)
    return elements.reshape(-1)


@final
@attrs.frozen(eq=False)
class _Selection(_View):
    """Some parts of a source."""

    parts: tuple[str, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """See `Source`."""
        return {part: value for part, value in self.source.values.items() if part in self.parts}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        everything = self.source.tensors.items()
        return {path: info for path, info in everything if split_path(path)[0] in self.parts}


def select(source: Source, parts: Sequence[str]) -> Source:
    """The parts of a source that are named: `"model"`, `"optimizer"`, `"extra"`."""
    return _Selection(source, tuple(parts))


@final
@attrs.frozen(eq=False)
class _Cast(_View):
    """The tensors of the model in another dtype, where they are floating-point numbers."""

    dtype: torch.dtype

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        return {
            path: TensorInfo(info.shape, self.dtype) if self._is_cast(path, info) else info
            for path, info in self.source.tensors.items()
        }

    def read(self, path: str, span: Span) -> Iterator[torch.Tensor]:
        """See `Source`."""
        info = self.source.tensors[path]
        if not self._is_cast(path, info):
            yield from self.source.read(path, span)
            return
        for piece in chunk_spans(span, max(info.dtype.itemsize, self.dtype.itemsize)):
            for chunk in self.source.read(path, piece):
                yield chunk.to(self.dtype)

    def _is_cast(self, path: str, info: TensorInfo) -> bool:
        return path.startswith("model/") and info.dtype.is_floating_point


def cast_model(source: Source, dtype: torch.dtype) -> Source:
    """The same with the floating-point tensors of the model in `dtype`; the optimizer's state stays as it is.

    Raises:
        CheckpointError: where `dtype` is not one of floating-point numbers.
    """
    if not dtype.is_floating_point:
        raise CheckpointError(
            f"a model cannot be cast to {dtype}", hint="give a dtype of floating-point numbers"
        )
    return _Cast(source, dtype)


@final
@attrs.frozen(eq=False)
class _Watched(_View):
    """Tells an observer what is read."""

    observe: Callable[[int], object]

    def read(self, path: str, span: Span) -> Iterator[torch.Tensor]:
        """See `Source`."""
        for chunk in self.source.read(path, span):
            yield chunk
            self.observe(chunk.nbytes)


def watch(source: Source, observe: Callable[[int], object]) -> Source:
    """The same; `observe` is called with the bytes of each chunk once it was used."""
    return _Watched(source, observe)


def tree_of(source: Source) -> dict[str, Any]:
    """The tree of a source, with a `Streamed` for each tensor."""
    tree: dict[str, Any] = _copied(source.values)
    aliases = aliases_of(source)
    for path, info in source.tensors.items():
        *parents, name = split_path(path)
        place: Any = tree
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        tensor = Streamed(aliases.get(path, path), info, partial(source.read, path))
        place[int(name) if isinstance(place, list) else name] = tensor
    return tree


def _copied(values: Any) -> Any:
    """The same, with the tuples that hold containers as lists, so that tensors can be put in their places."""
    if isinstance(values, Mapping):
        return {key: _copied(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        copied = [_copied(value) for value in values]
        plain = type(values) is tuple and not any(
            isinstance(each, (list, dict, type(None))) for each in copied
        )
        return tuple(copied) if plain else copied
    return values


def aliases_of(source: Source) -> dict[str, str]:
    """Tensors that are another one before them (tied weights), as far as the format tells: path by path."""
    if isinstance(source, _View):
        here = source.tensors
        return {path: to for path, to in aliases_of(source.source).items() if path in here and to in here}
    if isinstance(source, Own):
        return dict(source.reader.manifest.aliases)
    found: dict[str, str] = {}
    if isinstance(source, TreeSource):
        first: dict[Any, str] = {}
        for path, stored in source.stored.items():
            if stored.info.numel and first.setdefault(stored, path) != path:
                found[path] = first[stored]
    return found
