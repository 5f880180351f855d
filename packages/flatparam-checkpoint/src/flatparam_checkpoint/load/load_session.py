"""Loading on all ranks: choose, read and verify, agree, and only then change anything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam_checkpoint.agreement import agree, attempt, raise_first
from flatparam_checkpoint.load.prepared_model import (
    LoadOptions,
    PreparedAverages,
    PreparedModel,
    prepare_averages,
    prepare_model,
)
from flatparam_checkpoint.load.prepared_optimizer import PreparedOptimizer, prepare_optimizer
from flatparam_checkpoint.save.subject import Subject
from flatparam_files import CheckpointError, CheckpointReader
from flatparam_files.checkpoint.directory import CheckpointDirectory, read_manifest
from flatparam_files.checkpoint.manifest import MANIFEST, Manifest
from flatparam_files.checkpoint.reader import deletion_of, what_it_says
from flatparam_files.disk.progress import progress_bar
from flatparam_runtime import ExchangesValues, warn_caller
from flatparam_state.at_rest import bring_to_rest


@final
@attrs.frozen(eq=False)
class Loaded:
    """Everything that was loaded beside the model and the optimizer."""

    step: int
    extra: Any
    """The `extra` that was given to `save`; tensors are on the CPU."""
    rank_extra: Any
    """This rank's own, or None if the checkpoint is of a different world size."""
    world_size: int
    """The world size of the save."""
    save_id: str
    nbytes_read: int
    """The bytes that this rank has read of the ranks' files: a header for each file, and the blocks that it needs."""
    missing: tuple[str, ...]
    """Names in the model that the checkpoint lacks (with `strict=False`)."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that the model lacks (with `strict=False`)."""
    _path: Path

    def of_rank(self, rank: int) -> Any:
        """Return the `rank_extra` of any rank of the save; None if it gave none.

        Raises:
            CheckpointError: if it cannot be read any more, or there was no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self._path} is of {self.world_size} ranks: there was no rank {rank}", path=self._path
            )
        with CheckpointReader(self._path, read_manifest(self._path)) as reader:
            return rank_extra_of(reader, reader.manifest, rank)


def rank_extra_of(reader: CheckpointReader, manifest: Manifest, rank: int) -> Any:
    """Return the `rank_extra` that `rank` gave; None if it gave none."""
    return reader.decode(manifest.values.get("rank_extra", {}).get(str(rank)))


# Everything that a load will change on this rank, read and checked before anything is changed


@final
@attrs.frozen(eq=False)
class Prepared:
    """Everything that a load will change, ready."""

    model: PreparedModel | None
    optimizers: list[PreparedOptimizer]
    averages: list[PreparedAverages]
    loaded: Loaded

    def install(self) -> None:
        """Change the optimizers, the model and the averages."""
        for optimizer in self.optimizers:
            optimizer.install()
        if self.model is not None:
            self.model.install()
        for averages in self.averages:
            averages.install()


def prepare(reader: CheckpointReader, ranks: ExchangesValues, subject: Subject, options: LoadOptions) -> Prepared:
    """Read and check what this rank needs; nothing is changed.

    Raises:
        CheckpointError: if something is damaged, or does not fit.
    """
    model, prepared_model, prepared_optimizers, prepared_averages = subject.model, None, [], []
    if model is not None:
        bring_to_rest(model)
        prepared_model = prepare_model(reader, model, options)
        prepared_optimizers = [
            prepare_optimizer(
                reader,
                model,
                each,
                at,
                other_states=options.other_states,
                new=prepared_model.missing,
                converted=prepared_model.converted,
            )
            for at, each in subject.optimizers.items()
        ]
        found = [prepare_averages(reader, each, at, options) for at, each in subject.averages.items()]
        prepared_averages = [each for each in found if each is not None]
    manifest = reader.manifest
    extra = reader.decode(manifest.values.get("extra"))
    mine = rank_extra_of(reader, manifest, ranks.rank) if manifest.world_size == ranks.size else None
    loaded = Loaded(
        manifest.step,
        extra,
        mine,
        manifest.world_size,
        manifest.save_id,
        reader.nbytes_read,
        prepared_model.missing if prepared_model else (),
        prepared_model.unexpected if prepared_model else (),
        reader.path,
    )
    return Prepared(prepared_model, prepared_optimizers, prepared_averages, loaded)


# All ranks together


_TRIES: Final = 20
"""How often the latest checkpoint is chosen anew because a writer has deleted it."""


def load_checkpoint(
    directory: CheckpointDirectory, ranks: ExchangesValues, subject: Subject, step: int | None, options: LoadOptions
) -> Loaded | None:
    """Load the latest checkpoint, or that of `step`, as `Checkpointer.load` describes it."""
    for tries_left in reversed(range(_TRIES)):
        place = _agree_on_place(directory, ranks, step)
        if place is None:
            return None

        attempted = attempt(partial(_read, directory, ranks, place, subject, options), ranks.rank)
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
    options: LoadOptions,
) -> Prepared:
    """Read and check what this rank needs.

    Raises:
        CheckpointError: if there is a fault, or this rank finds a different checkpoint than rank 0.
    """
    path, save_id = place
    manifest = read_manifest(path)
    if manifest.save_id != save_id:
        raise CheckpointError(f"{path}: rank 0 finds save {save_id} here, this rank {manifest.save_id}", path=path)
    for rank, file in enumerate(manifest.files):
        _check_presence(directory, path / file.name, file.nbytes, rank)
    share = sum(file.nbytes for file in manifest.files) // ranks.size
    shows = False if ranks.rank else None
    with (
        CheckpointReader(path, manifest) as reader,
        progress_bar(f"load step {manifest.step}", share, shows) as reader.observe,
    ):
        return prepare(reader, ranks, subject, options)


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
