"""The directory of a run's checkpoints: which there are, which is the latest, which go."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs

from flatparam_files.checkpoint.fields import read_sealed, write_sealed
from flatparam_files.checkpoint.manifest import MANIFEST, Manifest
from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError
from flatparam_files.disk.system import ByteFile, make_directory, sync_directory, unreadable


class Moment(enum.Enum):
    """A point of a save, named by what has just happened; they come in this order.

    `FILE_OPENED` to `REPORTED` happen on every rank, the others on rank 0.
    """

    LOCKED = "the directory is locked"
    CLEANED = "what dead saves left is gone"
    PREPARED = "the temporary directory is there"
    FILE_OPENED = "the rank's file is there, empty"
    PIECE_WRITTEN = "one more piece is in the rank's file"
    FILE_SYNCED = "the rank's file is on the disk"
    REPORTED = "the rank has reported"
    MANIFEST_WRITTEN = "the manifest is on the disk"
    TEMPORARY_SYNCED = "the names in the temporary directory are on the disk"
    RENAMED = "the directory has its final name"
    COMMITTED = "the final name is on the disk"
    LATEST_WRITTEN = "the new `latest` is on the disk, under another name"
    LATEST_REPLACED = "`latest` names the new checkpoint"
    RETIRING = "an old checkpoint has lost its name"
    RETIRED = "an old checkpoint is gone"


OnMoment: TypeAlias = Callable[[Moment], None]
"""Is called at each moment; what it raises counts as a failure there."""


def nothing(moment: Moment) -> None:
    """Do nothing: the `OnMoment` outside of tests."""


_LATEST: Final = "latest"
_NEW_LATEST: Final = "latest.new"
_LATEST_NBYTES: Final = 4096
"""More than `latest` ever has."""
_BEGINNING_NBYTES: Final = 4096
"""Of a manifest; what it follows stands before the tensors."""
_TRIES: Final = 100
_COMMITTED: Final = re.compile(r"step-(\d{8,19})")
_LEFT: Final = re.compile(r"step-\d{8,19}\.(tmp|deleted)-[0-9a-f]{32}")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in directory `path`.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    file = path / MANIFEST
    try:
        return Manifest.from_json(read_sealed(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: not a manifest that this version reads: {error}", path=file, hint="use a different checkpoint"
        ) from error


@final
@attrs.frozen
class Chosen:
    """The checkpoint that is loaded, and what is strange about that (or "")."""

    path: Path
    manifest: Manifest
    warning: str = ""


@final
@attrs.frozen
class CheckpointDirectory:
    """`<root>/step-00000010/`, ..., and `<root>/latest`. Committed directories are never written to."""

    root: Path
    is_private: bool = False
    """Whether nobody but the owner can enter it, once it is made."""

    @property
    def names(self) -> tuple[str, str]:
        """Its path as it was given, and without links: by one of them all ranks have to know it."""
        return str(self.root), os.path.realpath(self.root)

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, if there is one."""
        return self.root / f"step-{step:08d}"

    def temporary_path(self, step: int, save_id: str) -> Path:
        """Return the path of the checkpoint of `step` before it is committed."""
        return self.root / f"step-{step:08d}.tmp-{save_id}"

    def make(self) -> None:
        """Make the directory if it is not there; a CheckpointError if something else is there."""
        try:
            make_directory(self.root, is_private=self.is_private)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._is_something_else() from error

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in order; none if there is no directory.

        Raises:
            CheckpointError: if something else is there.
            UnreadableError: if the system cannot list it.
        """
        try:
            # Only what has the name of one is looked into: a different directory may be closed to this user.
            named = [name for path in self.root.iterdir() if (name := _COMMITTED.fullmatch(path.name))]
            return sorted(int(name[1]) for name in named if (self.root / name[0] / MANIFEST).is_file())
        except FileNotFoundError as error:
            if os.path.lexists(self.root):
                raise self._is_something_else() from error
            return []
        except NotADirectoryError as error:
            raise self._is_something_else() from error
        except OSError as error:
            raise unreadable(self.root, "listed", error) from error

    def _is_something_else(self) -> CheckpointError:
        what = "a link to nothing" if self.root.is_symlink() and not self.root.exists() else "a file"
        return CheckpointError(
            f"{self.root}: expected a directory, or nothing, found {what} here or above",
            path=self.root,
            hint="give the directory of a run; nothing was changed",
        )

    def latest(self) -> tuple[int, str] | None:
        """Return the step and the save id that `latest` names; None if there is no such file.

        Raises:
            CheckpointError: if it is damaged.
        """
        path = self.root / _LATEST
        if not os.path.lexists(path):
            return None
        content = read_sealed(path, follows_links=False)
        name = _COMMITTED.fullmatch(str(content.get("name"))) if isinstance(content, dict) else None
        if name is None or not isinstance(content.get("save_id"), str):
            raise CheckpointError(f"{path}: it names no checkpoint", path=path)
        return int(name[1]), content["save_id"]

    def point_at(self, step: int, save_id: str, on_moment: OnMoment = nothing) -> None:
        """Have `latest` name this checkpoint, in one step for whoever reads it."""
        new = self.root / _NEW_LATEST
        # A writer died before it could rename it, or somebody has put a link there, whose target stays as it is.
        new.unlink(missing_ok=True)
        write_sealed(new, {"name": self.path_of(step).name, "save_id": save_id})
        on_moment(Moment.LATEST_WRITTEN)
        new.replace(self.root / _LATEST)
        sync_directory(self.root)
        on_moment(Moment.LATEST_REPLACED)

    def choose(self, step: int | None = None) -> Chosen | None:
        """Return the checkpoint to load: that of `step`, or the latest; None if there is no latest.

        A checkpoint that was committed, but not yet named by `latest` when its writer died, is the latest. If
        `latest` or what it names is damaged, it is the newest one whose manifest is sound.

        Raises:
            CheckpointError: if the checkpoint of `step` is not there; if there are some, and none is sound.
            UnreadableError: if the system cannot read `latest`, or the manifest of what it names.
        """
        if step is not None:
            if step not in self.steps():
                raise CheckpointError(
                    f"{self.path_of(step)}: expected a checkpoint of step {step}, found none",
                    path=self.path_of(step),
                    hint=f"there are those of {self.steps()}",
                )
            return Chosen(self.path_of(step), read_manifest(self.path_of(step)))
        for _ in range(_TRIES):
            before = self._latest_as_it_is()
            try:
                named = self._named()
            except UnreadableError:
                # It may be sound, and newer than what could be read.
                raise
            except CheckpointError as error:
                if self._latest_as_it_is() != before:
                    # A writer has gone on, and retired what was the latest.
                    continue
                return self._newest_sound(str(error))
            return self._newest_sound("") if named is None else self._successor(named) or named
        return self._newest_sound(f"{self.root / _LATEST} changes all the time")

    def _latest_as_it_is(self) -> tuple[bytes, str]:
        """Return the bytes of `latest`, and the error if it cannot be read: they tell whether it has changed."""
        try:
            with ByteFile(self.root / _LATEST, follows_links=False) as file:
                return bytes(file.read(0, min(file.nbytes, _LATEST_NBYTES))), ""
        except CheckpointError as error:
            return b"", str(error)

    def _named(self) -> Chosen | None:
        latest = self.latest()
        if latest is None:
            return None
        path = self.path_of(latest[0])
        manifest = read_manifest(path)
        if manifest.save_id != latest[1]:
            raise CheckpointError(
                f"{path}: expected save {latest[1]}, which latest names, found {manifest.save_id}", path=path
            )
        return Chosen(path, manifest)

    def _sound(self) -> Iterator[Chosen]:
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                yield Chosen(self.path_of(step), read_manifest(self.path_of(step)))

    def _age(self, number: int, step: int) -> tuple[int, int, int]:
        """Is larger for the newer of two checkpoints; time only decides between saves of the first versions."""
        return number, 0 if number else self._time_of(step), step

    def numbers(self) -> dict[int, int]:
        """By step, the number of each save whose manifest is sound."""
        return {chosen.manifest.step: chosen.manifest.number for chosen in self._sound()}

    def _successor(self, named: Chosen) -> Chosen | None:
        """Return the checkpoint that was committed after `named`, if its writer died before it could say so."""
        for step in reversed(self.steps()):
            path = self.path_of(step)
            if path != named.path and self._may_follow(path, named.manifest.save_id):
                with contextlib.suppress(CheckpointError):
                    manifest = read_manifest(path)
                    if manifest.follows == named.manifest.save_id:
                        return Chosen(path, manifest)
        return None

    def _may_follow(self, path: Path, save_id: str) -> bool:
        """Return whether the beginning of a manifest names the save that it follows, so that it is worth to be read."""
        try:
            with ByteFile(path / MANIFEST) as file:
                return save_id.encode() in file.read(0, min(file.nbytes, _BEGINNING_NBYTES))
        except CheckpointError:
            return False

    def _time_of(self, step: int) -> int:
        """Return when a checkpoint was written; -1 if it has just been retired."""
        try:
            return (self.path_of(step) / MANIFEST).stat().st_mtime_ns
        except FileNotFoundError:
            return -1

    def _newest_sound(self, why: str) -> Chosen | None:
        steps = self.steps()
        for chosen in sorted(self._sound(), key=lambda each: self._age(each.manifest.number, each.manifest.step))[-1:]:
            # The writer of the first checkpoint died before there was a `latest`.
            first = not why and chosen.manifest.follows is None
            lost = why or f"{self.root / _LATEST} is missing"
            warning = "" if first else f"{lost}: the newest sound checkpoint, {chosen.path.name}, is used instead"
            return attrs.evolve(chosen, warning=warning)
        if not steps and not why:
            return None
        raise CheckpointError(
            f"{self.root}: none of the checkpoints {steps} is sound" + (f": {why}" if why else ""),
            path=self.root,
            hint="restore one from a copy, or start again in a different directory",
        )

    def clean(self) -> None:
        """Remove what dead writers have left; only who holds the lock may."""
        for path in self.root.iterdir():
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        (self.root / _NEW_LATEST).unlink(missing_ok=True)

    def set_aside(self, step: int) -> Path:
        """Give the checkpoint of `step` a name under which nobody loads or deletes it; returns where it is then."""
        aside = self.root / f"{self.path_of(step).name}.damaged-{uuid.uuid4().hex}"
        self.path_of(step).rename(aside)
        sync_directory(self.root)
        return aside

    def retire(self, keep: int, spare: int, numbers: Mapping[int, int], on_moment: OnMoment = nothing) -> None:
        """Delete all but the `keep` newest checkpoints, and never that of step `spare`.

        Args:
            numbers: by step, the number of its save. A step that is not among them, whose manifest cannot be read, is
                as old as the one before it.

        Raises:
            OSError: if one cannot be deleted; it may have lost its name, and `clean` deletes it.
        """
        if keep < 1:
            raise ValueError(f"expected to keep at least 1 checkpoint, found {keep}")
        age: dict[int, tuple[int, int, int]] = {}
        known = 0
        for step in self.steps():
            known = numbers.get(step, known)
            if step != spare:
                age[step] = self._age(known, step)
        oldest_first = sorted(age, key=age.__getitem__)
        failed: OSError | None = None
        for step in oldest_first[: max(0, len(oldest_first) - (keep - 1))]:
            doomed = self.root / f"step-{step:08d}.deleted-{uuid.uuid4().hex}"
            try:
                # So nobody sees a checkpoint that is half deleted.
                self.path_of(step).rename(doomed)
                sync_directory(self.root)
                on_moment(Moment.RETIRING)
                shutil.rmtree(doomed)
                on_moment(Moment.RETIRED)
            except OSError as error:
                # One that cannot be deleted does not keep the others.
                failed = failed or error
        if failed is not None:
            raise failed
