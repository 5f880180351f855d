"""Loading on all ranks: choose, read and verify, agree, and only then change anything."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

from flatparam_runtime import Collectives
from flatparam_state.checkpoint.load.loaded import Loaded
from flatparam_state.checkpoint.load.prepared import Prepared, prepare
from flatparam_state.checkpoint.manifest import MANIFEST
from flatparam_state.checkpoint.protocol import (
    CheckpointDirectory,
    agree,
    attempt,
    check_one_directory,
    read_manifest,
)
from flatparam_state.checkpoint.reader import CheckpointReader, deletion_of, what_it_says
from flatparam_state.checkpoint.save import Subject
from flatparam_state.files import CheckpointError

__all__ = ["load_checkpoint"]


_TRIES: Final = 20
"""How often the latest checkpoint is chosen anew because a writer has deleted it."""


def load_checkpoint(
    directory: CheckpointDirectory,
    ranks: Collectives,
    subject: Subject,
    *,
    step: int | None,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> Loaded | None:
    """See `Checkpointer.load`."""
    for tries_left in reversed(range(_TRIES)):
        place = _agree_on_place(directory, ranks, step)
        if place is None:
            return None
        try:
            prepared = _prepare_everywhere(
                directory, ranks, place, subject, strict, convert_dtype, other_states
            )
        except CheckpointError as error:
            # Rank 0 has chosen it; a different rank may not see the directory at all.
            is_there = (place[0] / MANIFEST).exists()
            if ranks.exchange(is_there, label="look whether the checkpoint is there")[0]:
                raise
            # A writer has gone on, and retired what was the latest.
            if step is None and tries_left:
                continue
            raise deletion_of(place[0]) from error
        break
    prepared.install()
    return prepared.loaded


def _prepare_everywhere(
    directory: CheckpointDirectory,
    ranks: Collectives,
    place: tuple[Path, str],
    subject: Subject,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> Prepared:
    """Read and check what each rank needs, until all have said that it fits.

    Raises:
        CheckpointError: on every rank, if one has found a fault.
    """

    def read() -> Prepared:
        path, save_id = place
        manifest = read_manifest(path)
        if manifest.save_id != save_id:
            raise CheckpointError(
                f"{path}: rank 0 finds save {save_id} here, this rank {manifest.save_id}", path=path
            )
        for rank, file in enumerate(manifest.files):
            _check_presence(directory, path / file.name, file.nbytes, rank)
        with CheckpointReader(path, manifest) as reader:
            return prepare(reader, ranks, subject, strict, convert_dtype, other_states)

    attempted = attempt(read, ranks.rank)
    agree(ranks, attempted, label="load a checkpoint")
    prepared = attempted.value
    assert prepared is not None, "nobody has failed"
    return prepared


def _agree_on_place(
    directory: CheckpointDirectory, ranks: Collectives, step: int | None
) -> tuple[Path, str] | None:
    """The directory that rank 0 has chosen, and its save id."""

    def choose() -> tuple[Path, str] | None:
        chosen = directory.choose(step) if ranks.rank == 0 else None
        if chosen is not None and chosen.warning:
            warnings.warn(chosen.warning, stacklevel=7)
        return None if chosen is None else (chosen.path, chosen.manifest.save_id)

    attempted = attempt(choose, ranks.rank)
    fact = directory.names, attempted.value
    answers = agree(ranks, attempted, fact, label="choose a checkpoint")
    check_one_directory([names for names, _ in answers])
    place: tuple[Path, str] | None = answers[0][1]
    return place


def _check_presence(directory: CheckpointDirectory, path: Path, nbytes: int, rank: int) -> None:
    """A file that this rank does not read must be there too: it belongs to the checkpoint."""
    found = path.stat().st_size if path.exists() else None
    if found != nbytes:
        said = "no file" if found is None else f"{found:,}{what_it_says(path)}"
        raise CheckpointError(
            f"{path}: expected the {nbytes:,} bytes that rank {rank} wrote, found {said}",
            path=path,
            rank=rank,
            hint=f"restore the file from a copy, or use a different checkpoint of those of steps {directory.steps()}",
        )
