"""Loading on all ranks: choose, read and verify, agree, and only then change anything."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flatparam_checkpoint.agreement import agree, attempt, raise_first
from flatparam_checkpoint.load.loaded import Loaded
from flatparam_checkpoint.load.prepared import Prepared, prepare
from flatparam_checkpoint.save import Subject
from flatparam_files import CheckpointError, CheckpointReader
from flatparam_files.checkpoint import MANIFEST, CheckpointDirectory, deletion_of, read_manifest, what_it_says
from flatparam_runtime import ExchangesValues, warn_caller

__all__ = ["load_checkpoint"]


_TRIES: Final = 20
"""How often the latest checkpoint is chosen anew because a writer has deleted it."""


def load_checkpoint(
    directory: CheckpointDirectory,
    ranks: ExchangesValues,
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

        def read(place: tuple[Path, str] = place) -> Prepared:
            return _read(directory, ranks, place, subject, strict, convert_dtype, other_states)

        attempted = attempt(read, ranks.rank)
        # Rank 0 has chosen it; a different rank may not see the directory at all.
        is_there = (place[0] / MANIFEST).exists()
        told = ranks.exchange((attempted.failure, is_there), label="load a checkpoint")
        failures = [failed for failed, _ in told if failed is not None]
        if not failures:
            break
        if told[0][1] or any(failed.is_interrupt for failed in failures):
            raise_first(failures, attempted)
        # A writer has gone on, and retired what was the latest.
        if step is not None or not tries_left:
            raise deletion_of(place[0]) from attempted.cause
    prepared = attempted.value
    assert prepared is not None, "nobody has failed"
    prepared.install()
    return prepared.loaded


def _read(
    directory: CheckpointDirectory,
    ranks: ExchangesValues,
    place: tuple[Path, str],
    subject: Subject,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> Prepared:
    """Read and check what this rank needs.

    Raises:
        CheckpointError: if there is a fault, or this rank finds a different checkpoint than rank 0.
    """
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


def _agree_on_place(
    directory: CheckpointDirectory, ranks: ExchangesValues, step: int | None
) -> tuple[Path, str] | None:
    """Return the directory that rank 0 has chosen, and its save id."""

    def choose() -> tuple[Path, str] | None:
        chosen = directory.choose(step) if ranks.rank == 0 else None
        if chosen is not None and chosen.warning:
            warn_caller(chosen.warning)
        return None if chosen is None else (chosen.path, chosen.manifest.save_id)

    attempted = attempt(choose, ranks.rank)
    place: tuple[Path, str] | None = agree(ranks, attempted, attempted.value, label="choose a checkpoint")[0]
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
