"""The seam between checkpoint formats: whoever reads one is a `Source`, whoever writes one takes a `Source`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, final, runtime_checkable
from urllib.parse import unquote

import attrs
import torch
from torch import Tensor

from flatparam_core import Box, Span
from flatparam_files.disk.limits import MAX_DIMS

_SHOWN: Final = 100
CHUNK_NBYTES: Final = 8 * 2**20
"""The most bytes that a source yields at once."""


def _as_shape(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


@final
@attrs.frozen
class TensorInfo:
    """The shape and dtype of a tensor in a checkpoint. A ValueError says if no tensor has such a shape."""

    shape: tuple[int, ...] = attrs.field(converter=_as_shape)
    dtype: torch.dtype

    @shape.validator
    def _check_shape(self, field: attrs.Attribute[tuple[int, ...]], shape: tuple[int, ...]) -> None:
        if len(shape) > MAX_DIMS:
            raise ValueError(f"expected a shape of at most {MAX_DIMS:,} dimensions, found {len(shape):,}")
        if all(type(size) is int for size in shape) and math.prod(shape) >= 2**63:
            raise ValueError(f"expected a shape of fewer than 2^63 elements, found {str(shape)[:_SHOWN]}")

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.numel * self.dtype.itemsize


@runtime_checkable
class Source(Protocol):
    """A checkpoint of any format, read piece by piece.

    It is the tree `{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {name: tensor or value}}, "param_groups":
    [...]}, "extra": {...}}`. A tensor is known by its path (see `join_path`); everything else is in `values`.
    """

    @property
    def format(self) -> str:
        """`"flatparam"`, `"safetensors"`, `"torch"`, `"dcp"` or `"deepspeed"`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its path, such as `model/blocks.0.weight` or `optimizer/state/blocks.0.weight/exp_avg`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The same tree without the tensors: nested dicts and lists of plain Python values."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The known facts about the program that wrote it: versions, world size, save id."""

    def read(self, path: str, span: Span) -> Iterator[Tensor]:
        """Return the row-major elements `[span.start, span.stop)` of tensor `path`, in order.

        Yields:
            1-D CPU tensors of the tensor's dtype, at most `CHUNK_NBYTES` each.

        Raises:
            CheckpointError: if the bytes are not what they were when they were written.
        """


def join_path(parts: Sequence[str]) -> str:
    """The path of the tensor under the keys `parts`: joined by `/`; `/` and `%` in a part are percent-encoded."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def split_path(path: str) -> tuple[str, ...]:
    """Return the keys of which `join_path` made `path`."""
    return tuple(unquote(part, errors="strict") for part in path.split("/"))


def renamed(name: str, names: Mapping[str, str] | Callable[[str], str | None] | None) -> str:
    """Return the new name of a tensor; None, or an absent key of a mapping, keeps the old one."""
    if names is None:
        return name
    new = names(name) if callable(names) else names.get(name)
    return name if new is None else new


def chunk_spans(span: Span, itemsize: int) -> Iterator[Span]:
    """Cut `span` (in elements) into consecutive spans of at most `CHUNK_NBYTES`."""
    step = CHUNK_NBYTES // itemsize
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


def filled(out: Tensor, chunks: Iterable[Tensor]) -> Tensor:
    """Copy `chunks`, one behind the other, into `out` (1-D), which they may leave unfilled at its end; returns it."""
    done = 0
    for chunk in chunks:
        out[done : done + chunk.numel()].copy_(chunk.detach().reshape(-1))
        done += chunk.numel()
    return out


def read_boxes(info: TensorInfo, span: Span, fill: Callable[[Box, Tensor], object]) -> Iterator[Tensor]:
    """Yield the row-major elements `span` of a tensor in chunks; `fill(box, out)` puts those of a box into `out`."""
    for piece in chunk_spans(span, info.dtype.itemsize):
        chunk = torch.empty(piece.numel, dtype=info.dtype, device="cpu")
        at = 0
        for box in piece.boxes(info.shape):
            fill(box, chunk[at : at + box.numel].view(box.sizes))
            at += box.numel
        yield chunk


def row_major_boxes(shape: Sequence[int], span: Span) -> Iterator[Box]:
    """The boxes that tile the row-major elements `span` of a tensor of `shape`, in order; at most `2 * ndim - 1`."""
    return span.boxes(shape)
