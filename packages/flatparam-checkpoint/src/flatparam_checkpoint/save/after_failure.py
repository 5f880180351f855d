"""A last save after a rank has failed: the ranks meet without a collective, and compare where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam_checkpoint.save.save_session import Saver
from flatparam_comm import survivors_of
from flatparam_files import CheckpointError
from flatparam_files.checkpoint.fields import check_step
from flatparam_runtime import Collectives, ExchangesValues

_HINT: Final = "resume from the latest checkpoint"


@final
@attrs.frozen
class _Place:
    """Where a rank stands: the optimizer steps that its process has done, and whether one was not completed."""

    steps: int
    is_in_step: bool


def save_after_failure(
    saver: Saver,
    ranks: ExchangesValues,
    error: BaseException | None,
    step: int,
    extra: Any,
    rank_extra: Any,
    seconds: float,
) -> Path:
    """Save everything as the checkpoint of `step`, as `Checkpointer.save_last` describes it.

    Raises:
        CheckpointError: if the ranks' parts are not of one moment, or a rank cannot write its part.
        CommError: if a rank has not come in time.
    """
    if ranks.size == 1:
        return _save(saver.with_ranks(ranks), step, extra, rank_extra)
    if not isinstance(ranks, Collectives):
        raise CheckpointError(
            "expected ranks of one process group, found a model over two groups that are not all ranks",
            hint="pass ranks=, a group of those that hold the model together",
        )
    survivors = survivors_of(ranks, error, seconds)
    try:
        places = survivors.exchange(_Place(survivors.steps, survivors.is_in_step), label="meet for a last save")
        _check(places)
        return _save(saver.with_ranks(survivors), step, extra, rank_extra)
    finally:
        survivors.leave()


def _save(saver: Saver, step: int, extra: Any, rank_extra: Any) -> Path:
    saver.begin("save_last", {"step": step}, lambda: check_step(step))
    return saver.save(step, extra, rank_extra)


def _check(places: Sequence[_Place]) -> None:
    """Refuse parts of different moments."""
    for rank, place in enumerate(places):
        if place.is_in_step:
            raise CheckpointError(
                f"rank {rank}: its exception came out of an optimizer's step, so some of its parameters may be stepped "
                "and others not",
                rank=rank,
                hint=_HINT,
            )
        if place.steps != places[0].steps:
            raise CheckpointError(
                f"rank 0 has done {places[0].steps} optimizer steps, and rank {rank} {place.steps}: their parts of the "
                "model are of different moments",
                rank=rank,
                hint=_HINT,
            )
