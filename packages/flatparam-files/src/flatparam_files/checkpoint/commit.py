"""From files of ranks to a checkpoint, in one step for whoever reads; see `moments` for the order."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import torch

from flatparam_core import warn_caller
from flatparam_files import __version__
from flatparam_files.checkpoint.directory import CheckpointDirectory, Moment, OnMoment, nothing
from flatparam_files.checkpoint.fields import write_sealed
from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.checkpoint.manifest import MANIFEST, FilePiece, Manifest, RankValue, TensorRecord
from flatparam_files.checkpoint.rank_part import RankReport, Ticket, report_path
from flatparam_files.checkpoint.soundness import damage_of
from flatparam_files.checkpoint.values import decode, graft
from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError
from flatparam_files.disk.source import TensorInfo, split_path
from flatparam_files.disk.system import bytes_view, make_directory, sync_directory


@final
@attrs.define(eq=False)
class Committer:
    """The one process that gives names: rank 0."""

    directory: CheckpointDirectory
    keep: int | None = None
    on_moment: OnMoment = nothing
    lock: DirectoryLock = attrs.Factory(lambda self: DirectoryLock(self.directory.root), takes_self=True)
    _latest: tuple[int, str] | None = None
    _numbers: dict[int, int] = attrs.field(factory=dict)
    """By step, the number of its save; of the checkpoints that this committer knows."""

    def prepare(self, step: int) -> Ticket:
        """Lock the directory, clear away what dead writers have left, and make the temporary directory.

        Raises:
            CheckpointError: if somebody else writes there, or a checkpoint of `step` is there already that is sound, or
                that cannot be read.
        """
        directory = self.directory
        directory.make()
        if self.lock.acquire():
            self._recover()
        self.on_moment(Moment.LOCKED)
        directory.clean()
        self.on_moment(Moment.CLEANED)
        # Before a damaged checkpoint is set aside: it may have the largest number.
        number = max(self._numbers.values(), default=0) + 1
        self._make_way(step)
        save_id = uuid.uuid4().hex
        follows = None if self._latest is None else self._latest[1]
        ticket = Ticket(step, save_id, follows, directory.temporary_path(step, save_id), number)
        make_directory(ticket.temporary)
        self.on_moment(Moment.PREPARED)
        return ticket

    def _make_way(self, step: int) -> None:
        """Set aside a damaged checkpoint of `step`, which a job that resumed from an earlier step has reached again."""
        path = self.directory.path_of(step)
        if not path.exists():
            return
        problem = damage_of(path)
        if not problem:
            raise CheckpointError(
                f"{path}: a checkpoint of step {step} exists already, and a committed checkpoint is never changed",
                path=path,
                hint="delete it, or save to a different directory",
            )
        aside = self.directory.set_aside(step)
        self._numbers.pop(step, None)
        warn_caller(
            f"the checkpoint of step {step} in {self.directory.root} is damaged, and is saved again; its files "
            f"are now in {aside.name}, which can be deleted: {problem}"
        )

    def _recover(self) -> None:
        """Have `latest` name what the writer before has committed last, if it died before it could say so."""
        try:
            chosen = self.directory.choose()
        except UnreadableError:
            raise
        except CheckpointError:
            # Nothing there is sound, but the new checkpoint will be.
            chosen = None
        self._numbers, self._latest = {} if self.keep is None else self.directory.numbers(), None
        if chosen is not None:
            self._numbers[chosen.manifest.step] = chosen.manifest.number
            self._latest = chosen.manifest.step, chosen.manifest.save_id
            try:
                known = self.directory.latest()
            except CheckpointError:
                known = None
            if known != self._latest:
                self.directory.point_at(*self._latest)

    def commit(self, ticket: Ticket, world_size: int) -> Path:
        """Make the checkpoint of the ranks' files, once all have reported; returns where it is.

        If older checkpoints cannot be deleted, that is a warning.

        Raises:
            CheckpointError: if they do not fit together; also if the checkpoint is there, but something has failed
                afterwards.
        """
        directory, temporary, moment = self.directory, ticket.temporary, self.on_moment
        reports = [RankReport.read(temporary, rank, ticket.save_id) for rank in range(world_size)]
        write_sealed(temporary / MANIFEST, _merge(ticket, reports).to_json())
        moment(Moment.MANIFEST_WRITTEN)
        for rank in range(world_size):
            report_path(temporary, rank).unlink()
        sync_directory(temporary)
        moment(Moment.TEMPORARY_SYNCED)
        final = directory.path_of(ticket.step)
        if final.exists():
            raise CheckpointError(f"{final}: a different process has made this directory in the meantime", path=final)
        temporary.rename(final)
        self._numbers[ticket.step] = ticket.number
        try:
            moment(Moment.RENAMED)
            sync_directory(directory.root)
            moment(Moment.COMMITTED)
            directory.point_at(ticket.step, ticket.save_id, moment)
        except (CheckpointError, OSError) as error:
            with contextlib.suppress(CheckpointError):
                self._latest = directory.latest()
            raise CheckpointError(
                f"{final}: step {ticket.step} is saved, and load() finds it, but not everything about it may be on the "
                f"disk yet: {error}",
                path=final,
                hint="see what is wrong with the disk, and save the next step",
            ) from error
        self._latest = ticket.step, ticket.save_id
        if self.keep is not None:
            self._retire(self.keep, ticket.step)
        return final

    def _retire(self, keep: int, step: int) -> None:
        """Delete the checkpoints before that of `step`, all but `keep`; what cannot be deleted is warned about."""
        directory = self.directory
        try:
            directory.retire(keep, step, self._numbers, self.on_moment)
            self._numbers = {each: self._numbers[each] for each in directory.steps() if each in self._numbers}
        except (CheckpointError, OSError) as error:
            warnings.warn(
                f"the checkpoint of step {step} in {directory.root} is saved, but older ones could not be deleted, "
                f"which the next save tries again: {error}",
                stacklevel=10,
            )

    def abandon(self, ticket: Ticket) -> None:
        """Remove what there is of a save that has failed."""
        shutil.rmtree(ticket.temporary, ignore_errors=True)

    def close(self) -> None:
        """Let others write to the directory."""
        self.lock.release()


# The manifest that comes of the reports of all ranks


def _merge(ticket: Ticket, reports: Sequence[RankReport]) -> Manifest:
    """Return the manifest of all ranks' files.

    Raises:
        CheckpointError: if the ranks' parts do not make whole tensors, naming one that is not.
    """
    try:
        tensors = _merged_tensors((path, record) for report in reports for path, record in report.tensors.items())
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
        {"flatparam_files": __version__, "torch": torch.__version__, "python": platform.python_version()},
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


def _merged_tensors(parts: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Return the tensors of which `parts` are the pieces.

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
    for path, record in records.items():
        try:
            found = tuple(sorted(pieces[path], key=lambda piece: piece.span))
            records[path] = attrs.evolve(record, pieces=found)
        except ValueError as error:
            raise ValueError(
                f"{path!r}: {error}; ranks that do not share one model need a directory of their own each"
            ) from error
    return records
