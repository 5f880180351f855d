"""The contribution of one rank to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_core import Span
from flatparam_files.checkpoint.manifest import RankValue, TensorRecord, encode
from flatparam_files.disk import CHUNK_NBYTES, TensorInfo

__all__ = ["Contribution", "OwnedPiece", "Ticket", "row_major_chunks"]


@final
@attrs.frozen(eq=False)
class OwnedPiece:
    """Elements `span` (in memory order) of the tensor `path`, which this rank writes; `chunks` gives them in order."""

    path: str
    record: TensorRecord
    span: Span
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.span.numel * self.record.info.dtype.itemsize

    def staged(self) -> Self:
        """The same piece with its elements copied to host memory."""
        copy = torch.empty(self.span.numel, dtype=self.record.info.dtype, device="cpu")
        done = 0
        for chunk in self.chunks():
            copy[done : done + chunk.numel()].copy_(chunk.detach().reshape(-1))
            done += chunk.numel()
        return attrs.evolve(self, chunks=lambda: (copy,))


def row_major_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of `tensor` in row-major order; if it is not contiguous, at most a chunk is copied at once."""
    if tensor.is_contiguous() or tensor.nbytes <= CHUNK_NBYTES or tensor.dim() == 0:
        yield tensor.detach().reshape(-1)
    else:
        for row in tensor.detach().unbind(0):
            yield from row_major_chunks(row)


def row_major_on_demand(tensor: Tensor) -> Callable[[], Iterator[Tensor]]:
    """Gives `row_major_chunks` of `tensor` when it is called."""
    return lambda: row_major_chunks(tensor)


@final
@attrs.frozen
class Ticket:
    """A save that has begun: everything that the ranks must know of it."""

    step: int
    save_id: str
    follows: str | None
    temporary: Path
    number: int = 1
    """See `Manifest.number`."""


@final
@attrs.define(eq=False)
class Contribution:
    """Everything that one rank saves: the pieces that it writes, and what goes into the manifest by its word."""

    pieces: list[OwnedPiece] = attrs.field(factory=list)
    rank_values: dict[str, RankValue] = attrs.field(factory=dict)
    """The states that are not cut like their parameter, by path."""
    aliases: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def disk_nbytes(self) -> int:
        """The most bytes that it will take on the disk, with the header, the report and its share of the manifest."""
        names = sum(2 * len(piece.path) + 256 + piece.nbytes // 2**14 for piece in self.pieces)
        values = len(json.dumps([self.values, [each.to_json() for each in self.rank_values.values()]]))
        return self.nbytes + 2 * (names + values) + 2**15

    def add_values(self, at: tuple[str, ...], value: Any) -> None:
        """Add a tree of the user's, with its tensors, under the keys `at`."""
        tensors: dict[str, Tensor] = {}
        tree = encode(value, at, tensors)
        parent = self.values
        for key in at[:-1]:
            parent = parent.setdefault(key, {})
        parent[at[-1]] = tree
        for path, tensor in tensors.items():
            record = TensorRecord(TensorInfo(tensor.shape, tensor.dtype))
            piece = OwnedPiece(path, record, Span(0, tensor.numel()), row_major_on_demand(tensor))
            self.pieces.append(piece)

    def tree(self, *at: str) -> Any:
        """The encoded tree under the keys `at` of `values`."""
        tree: Any = self.values
        for key in at:
            tree = tree[key]
        return tree

    def staged(self) -> Self:
        """The same with all bytes in host memory of its own."""
        return attrs.evolve(self, pieces=[piece.staged() for piece in self.pieces])
