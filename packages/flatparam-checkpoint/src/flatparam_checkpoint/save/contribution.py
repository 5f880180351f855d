"""Everything that one rank contributes to a checkpoint, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_files import CHUNK_NBYTES, OnMoment, Staging, TensorInfo
from flatparam_files.checkpoint.manifest import RankValue, TensorRecord
from flatparam_files.checkpoint.rank_part import RankFileWriter, RankReport, Ticket
from flatparam_files.checkpoint.values import encode
from flatparam_files.disk.progress import progress_bar
from flatparam_files.disk.source import filled
from flatparam_files.disk.system import make_directory
from flatparam_runtime import Span


@final
@attrs.frozen(eq=False)
class OwnedPiece:
    """Elements `span` (in memory order) of the tensor `path`, which this rank writes from `elements`, row-major."""

    path: str
    record: TensorRecord
    span: Span
    elements: Tensor

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.span.numel * self.record.info.dtype.itemsize

    def staged(self) -> Self:
        """Return the same piece with its elements copied to host memory."""
        copy = torch.empty(self.span.numel, dtype=self.record.info.dtype, device="cpu")
        return attrs.evolve(self, elements=filled(copy, _row_major_chunks(self.elements)))


def _row_major_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of `tensor` in row-major order; if it is not contiguous, at most a chunk is copied at once."""
    if tensor.is_contiguous() or tensor.nbytes <= CHUNK_NBYTES or tensor.dim() == 0:
        yield tensor.detach().reshape(-1)
    else:
        for row in tensor.detach().unbind(0):
            yield from _row_major_chunks(row)


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
            self.pieces.append(OwnedPiece(path, record, Span(0, tensor.numel()), tensor))

    def tree(self, *at: str) -> Any:
        """Return the encoded tree under the keys `at` of `values`."""
        tree: Any = self.values
        for key in at:
            tree = tree[key]
        return tree

    def staged(self) -> Self:
        """Return the same with all bytes in host memory of its own."""
        return attrs.evolve(self, pieces=[piece.staged() for piece in self.pieces])

    def write(
        self, ticket: Ticket, rank: int, world_size: int, on_moment: OnMoment, *, shows: bool | None = False
    ) -> None:
        """Write it to the file of `rank` in the temporary directory, and then the rank's report.

        Args:
            shows: whether to show a bar, see `progress_bar`.
        """
        make_directory(ticket.temporary)
        plans = [(piece.path, piece.record, piece.span) for piece in self.pieces]
        writer = RankFileWriter(ticket, rank, world_size, plans, staging=Staging(), on_moment=on_moment)
        try:
            with progress_bar(f"save step {ticket.step}", self.nbytes, shows) as observe:
                for piece in self.pieces:
                    if piece.span:
                        writer.write(_row_major_chunks(piece.elements))
                    observe(piece.nbytes)
            file = writer.finish()
        finally:
            writer.close()
        said = self.rank_values, self.aliases, self.values
        RankReport(ticket.save_id, rank, file, writer.records, *said).write(ticket.temporary, on_moment)
