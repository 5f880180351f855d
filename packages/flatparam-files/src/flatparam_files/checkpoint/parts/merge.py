"""The manifest that comes of the reports of all ranks."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from flatparam_files.checkpoint.manifest import FilePiece, Manifest, RankValue, TensorRecord, decode, graft
from flatparam_files.checkpoint.parts.contribution import Ticket
from flatparam_files.checkpoint.parts.report import RankReport
from flatparam_files.disk import CheckpointError, TensorInfo, bytes_view, split_path

__all__ = ["merge", "merged_tensors"]


def merge(ticket: Ticket, reports: Sequence[RankReport], version: str) -> Manifest:
    """The manifest of all ranks' files.

    Raises:
        CheckpointError: if the ranks' parts do not make whole tensors, naming one that is not.
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
    per_rank = _settle_rank_values(reports, tensors, values)
    return Manifest(
        ticket.save_id,
        ticket.step,
        ticket.follows,
        tuple(report.file for report in reports),
        tensors,
        per_rank,
        {alias: path for report in reports for alias, path in report.aliases.items()},
        values,
        {"flatparam_files": version, "torch": torch.__version__, "python": platform.python_version()},
        ticket.number,
    )


def _settle_rank_values(
    reports: Sequence[RankReport], tensors: dict[str, TensorRecord], values: dict[str, Any]
) -> dict[str, tuple[RankValue, ...]]:
    """Make one tensor or value of what all ranks have the same of; return the others."""
    by_path: dict[str, list[RankValue]] = {}
    for report in reports:
        for path, found in report.rank_values.items():
            by_path.setdefault(path, []).append(found)
    differing: dict[str, tuple[RankValue, ...]] = {}
    for path, found_on_ranks in by_path.items():
        if len({_identity(each.value, tensors) for each in found_on_ranks}) > 1:
            differing[path] = tuple(found_on_ranks)
            continue
        value = found_on_ranks[0].value
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


def merged_tensors(parts: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """The tensors of which `parts` are the pieces.

    Raises:
        ValueError: if two parts do not belong to one tensor, naming it.
    """
    records: dict[str, TensorRecord] = {}
    pieces: dict[str, list[FilePiece]] = {}
    for path, part in parts:
        empty = attrs.evolve(part, pieces=())
        known = records.setdefault(path, empty)
        if empty != known:
            raise ValueError(f"{path!r} is {part.info} on one rank and {known.info} on another")
        pieces.setdefault(path, []).extend(part.pieces)
    return {path: _whole(path, record, pieces[path]) for path, record in records.items()}


def _whole(path: str, record: TensorRecord, pieces: list[FilePiece]) -> TensorRecord:
    try:
        return attrs.evolve(record, pieces=tuple(sorted(pieces, key=lambda piece: piece.span)))
    except ValueError as error:
        raise ValueError(
            f"{path!r}: {error}; ranks that do not share one model need a directory of their own each"
        ) from error
