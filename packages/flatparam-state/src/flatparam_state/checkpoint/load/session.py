"""Loading on all ranks: choose, read and verify, agree, and only then change anything."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam_runtime import Collectives
from flatparam_state.checkpoint.load.prepared_model import (
    PreparedAverages,
    PreparedModel,
    prepare_averages,
    prepare_model,
)
from flatparam_state.checkpoint.load.prepared_optimizer import PreparedOptimizer, prepare_optimizer
from flatparam_state.checkpoint.manifest import MANIFEST, Manifest
from flatparam_state.checkpoint.model_tensors import bring_to_rest
from flatparam_state.checkpoint.protocol import CheckpointDirectory, agree, attempt, read_manifest
from flatparam_state.checkpoint.reader import CheckpointReader, deletion_of, what_it_says
from flatparam_state.checkpoint.save import Subject
from flatparam_state.files import CheckpointError

__all__ = ["Loaded", "load_checkpoint"]


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
        """The `rank_extra` of any rank of the save; None if it gave none.

        Raises:
            CheckpointError: if it cannot be read any more, or there was no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self._path} is of {self.world_size} ranks: there was no rank {rank}", path=self._path
            )
        with CheckpointReader(self._path, read_manifest(self._path)) as reader:
            return _rank_extra(reader, reader.manifest, rank)


_TRIES: Final = 20
"""How often the latest checkpoint is chosen anew because a writer has deleted it."""


@final
@attrs.frozen(eq=False)
class _Prepared:
    """Everything that a load will change, ready."""

    model: PreparedModel | None
    optimizers: list[PreparedOptimizer]
    averages: list[PreparedAverages]
    loaded: Loaded


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
    for optimizer in prepared.optimizers:
        optimizer.install()
    if prepared.model is not None:
        prepared.model.install()
    for averages in prepared.averages:
        averages.install()
    return prepared.loaded


def _prepare_everywhere(
    directory: CheckpointDirectory,
    ranks: Collectives,
    place: tuple[Path, str],
    subject: Subject,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> _Prepared:
    """Read and check what each rank needs, until all have said that it fits.

    Raises:
        CheckpointError: on every rank, if one has found a fault.
    """

    def prepare() -> _Prepared:
        path, save_id = place
        manifest = read_manifest(path)
        if manifest.save_id != save_id:
            raise CheckpointError(
                f"{path}: rank 0 finds save {save_id} here, this rank {manifest.save_id}", path=path
            )
        for rank, file in enumerate(manifest.files):
            _check_presence(directory, path / file.name, file.nbytes, rank)
        with CheckpointReader(path, manifest) as reader:
            return _prepare(reader, ranks, subject, strict, convert_dtype, other_states)

    attempted = attempt(prepare, ranks.rank)
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
    answers: list[tuple[Path, str] | None] = agree(
        ranks, attempted, attempted.value, label="choose a checkpoint"
    )
    return answers[0]


def _prepare(
    reader: CheckpointReader,
    ranks: Collectives,
    subject: Subject,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> _Prepared:
    model, prepared_model, prepared_optimizers, prepared_averages = subject.model, None, [], []
    if model is not None:
        bring_to_rest(model)
        prepared_model = prepare_model(reader, model, strict=strict, convert_dtype=convert_dtype)
        prepared_optimizers = [
            prepare_optimizer(reader, model, each, at, other_states=other_states)
            for at, each in subject.optimizers.items()
        ]
        found = [
            prepare_averages(reader, each, at, strict=strict, convert_dtype=convert_dtype)
            for at, each in subject.averages.items()
        ]
        prepared_averages = [each for each in found if each is not None]
    manifest = reader.manifest
    extra = reader.decode(manifest.values.get("extra"))
    mine = _rank_extra(reader, manifest, ranks.rank) if manifest.world_size == ranks.size else None
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
    return _Prepared(prepared_model, prepared_optimizers, prepared_averages, loaded)


def _rank_extra(reader: CheckpointReader, manifest: Manifest, rank: int) -> Any:
    return reader.decode(manifest.values.get("rank_extra", {}).get(str(rank)))


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
