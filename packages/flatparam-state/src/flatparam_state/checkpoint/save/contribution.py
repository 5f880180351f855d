"""What one rank contributes to a checkpoint, its report when that is written, and the manifest that comes of all."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from typing_extensions import Self, final

from flatparam_state.checkpoint.manifest.records import (
    Copy,
    FileRecord,
    Manifest,
    TensorRecord,
    merged_tensors,
)
from flatparam_state.checkpoint.manifest.sealed import read_sealed, seal
from flatparam_state.checkpoint.manifest.values import decode
from flatparam_state.checkpoint.moments import Moment, OnMoment, nothing
from flatparam_state.checkpoint.save.rank_file import OwnedPiece
from flatparam_state.errors import CheckpointError
from flatparam_state.files.safetensors.stream import bytes_view
from flatparam_state.source import TensorInfo, split_path

__all__ = ["PER_RANK", "Contribution", "Report", "Ticket", "graft", "merge", "report_path"]

PER_RANK = "per_rank"
"""The first part of the paths of tensors that only stand for others: copies that differ between ranks."""


@final
@attrs.frozen
class Ticket:
    """A save that has begun: everything that the ranks must know of it."""

    step: int
    save_id: str
    follows: str | None
    temporary: Path


@final
@attrs.define(eq=False)
class Contribution:
    """What one rank saves: the pieces that it writes, and what goes into the manifest by its word."""

    pieces: list[OwnedPiece] = attrs.field(factory=list)
    copies: dict[str, Copy] = attrs.field(factory=dict)
    """States that are not cut like their parameter, by path."""
    aliases: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def disk_nbytes(self) -> int:
        """What it will take on the disk, at most: with the header, the report and its share of the manifest."""
        names = sum(2 * len(piece.path) + 256 + piece.nbytes // 2**14 for piece in self.pieces)
        values = len(json.dumps([self.values, [copy.to_json() for copy in self.copies.values()]]))
        return self.nbytes + 2 * (names + values) + 2**15

    def tree(self, *at: str) -> Any:
        """What is under the keys `at` of `values`, encoded."""
        tree: Any = self.values
        for key in at:
            tree = tree[key]
        return tree

    def staged(self) -> Self:
        """The same with all bytes in host memory of its own."""
        return attrs.evolve(self, pieces=[piece.staged() for piece in self.pieces])


@final
@attrs.frozen
class Report:
    """That a rank has written its file, and what is in it."""

    save_id: str
    rank: int
    file: FileRecord
    tensors: Mapping[str, TensorRecord]
    copies: Mapping[str, Copy]
    aliases: Mapping[str, str]
    values: Any

    def write(self, directory: Path, on_moment: OnMoment = nothing) -> None:
        """Put it into `directory`, whole or not at all."""
        path = report_path(directory, self.rank)
        new = path.with_suffix(".new")
        new.write_bytes(seal(self._to_json()))
        new.replace(path)
        on_moment(Moment.REPORTED)

    def _to_json(self) -> dict[str, Any]:
        return {
            "save_id": self.save_id,
            "rank": self.rank,
            "file": self.file.to_json(),
            "tensors": {path: record.to_json() for path, record in self.tensors.items()},
            "copies": {path: copy.to_json() for path, copy in self.copies.items()},
            "aliases": dict(self.aliases),
            "values": self.values,
        }

    @classmethod
    def read(cls, directory: Path, rank: int, save_id: str) -> Self:
        """The report of `rank` in `directory`.

        Raises:
            CheckpointError: where it is not there, or of another save, or the file is not as it says.
        """
        path = report_path(directory, rank)
        tree = read_sealed(path)
        if (tree["save_id"], tree["rank"]) != (save_id, rank):
            raise CheckpointError(f"{path}: expected rank {rank} of save {save_id}", path=path, rank=rank)
        file = FileRecord.from_json(tree["file"], rank)
        found = (directory / file.name).stat().st_size
        if found != file.nbytes:
            raise CheckpointError(
                f"{directory / file.name}: rank {rank} wrote {file.nbytes:,} bytes, rank 0 finds {found:,}",
                path=directory / file.name,
                rank=rank,
                hint="all ranks must see one and the same directory",
            )
        tensors = {at: TensorRecord.from_json(record) for at, record in tree["tensors"].items()}
        copies = {at: Copy.from_json(copy) for at, copy in tree["copies"].items()}
        return cls(save_id, rank, file, tensors, copies, tree["aliases"], tree["values"])


def report_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` reports."""
    return directory / f"rank-{rank:05d}.done"


def merge(ticket: Ticket, reports: Sequence[Report], version: str) -> Manifest:
    """The manifest of all ranks' files.

    Raises:
        CheckpointError: where the ranks' parts do not make whole tensors, naming one that is not.
    """
    try:
        tensors = merged_tensors(
            (path, record) for report in reports for path, record in report.tensors.items()
        )
    except ValueError as error:
        raise CheckpointError(f"the ranks do not save one model: {error}") from error
    for path, record in tensors.items():
        if record.gaps:
            gap = record.gaps[0]
            raise CheckpointError(
                f"no rank has elements [{gap.start}, {gap.stop}) of {path!r}",
                fqn=split_path(path)[1 if path.startswith("model/") else -2],
                hint="pass all ranks that share the model as `ranks`",
            )
    values: dict[str, Any] = {}
    for report in reports:
        for key, tree in report.values.items():
            values[key] = {**values[key], **tree} if key in values and key == "rank_extra" else tree
    per_rank = _settle_copies(reports, tensors, values)
    return Manifest(
        ticket.save_id,
        ticket.step,
        ticket.follows,
        tuple(report.file for report in reports),
        tensors,
        per_rank,
        {alias: path for report in reports for alias, path in report.aliases.items()},
        values,
        {"flatparam_state": version, "torch": torch.__version__, "python": platform.python_version()},
    )


def _settle_copies(
    reports: Sequence[Report], tensors: dict[str, TensorRecord], values: dict[str, Any]
) -> dict[str, tuple[Copy, ...]]:
    """Where all ranks have the same, make one tensor or value of it; return the others."""
    by_path: dict[str, list[Copy]] = {}
    for report in reports:
        for path, copy in report.copies.items():
            by_path.setdefault(path, []).append(copy)
    differing: dict[str, tuple[Copy, ...]] = {}
    for path, copies in by_path.items():
        if len({_identity(copy.value, tensors) for copy in copies}) > 1:
            differing[path] = tuple(copies)
            continue
        value = copies[0].value
        tag = next(iter(value), "") if isinstance(value, dict) else ""
        if tag == "$tensor":
            tensors[path] = attrs.evolve(tensors[value[tag]], whole=True)
        elif tag == "$inline":
            tensor = decode(value, lambda _: None)
            data = bytes(bytes_view(tensor).tolist())
            tensors[path] = TensorRecord(TensorInfo(tensor.shape, tensor.dtype), whole=True, inline=data)
        else:
            graft(values, split_path(path), value)
    return differing


def _identity(value: Any, tensors: Mapping[str, TensorRecord]) -> str:
    if isinstance(value, dict) and "$tensor" in value:
        record = tensors[value["$tensor"]]
        return f"{record.info} {[piece.hashes for piece in record.pieces]}"
    return json.dumps(value)


def graft(tree: Any, parts: Sequence[str], value: Any) -> None:
    """Put `value` under the keys `parts` of an encoded tree, where dicts and lists on the way allow it."""
    for part in parts[:-1]:
        if isinstance(tree, list):
            tree = tree[int(part)]
        else:
            tree = tree.setdefault(part, {})
    if isinstance(tree, list):
        tree[int(parts[-1])] = value
    else:
        tree[parts[-1]] = value
