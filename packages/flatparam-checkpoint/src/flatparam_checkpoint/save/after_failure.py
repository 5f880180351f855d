"""A last save after a rank has failed: the ranks meet without a collective, and compare where each of them stands."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import attrs
from torch import nn

from flatparam_checkpoint.agreement import some_of
from flatparam_checkpoint.save.save_session import Saver
from flatparam_comm import survivors_of
from flatparam_files import CheckpointError
from flatparam_files.checkpoint.fields import check_step
from flatparam_runtime import Collectives, ExchangesValues, clean_fqn, untraced

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

_HINT: Final = "resume from the latest checkpoint"


@final
@attrs.frozen
class _Place:
    """Where a rank stands: the optimizer steps that its process has done, and whether one was not completed."""

    steps: int
    is_in_step: bool
    updates: Mapping[tuple[str, ...], int]
    """How often each average was updated."""


@final
class WrittenBuffers:
    """Notices which buffers of a model's state were written after its optimizer's last step, as a forward pass does."""

    def __init__(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Look at the buffers after each step of the optimizers that have hooks for it."""
        self._places = [
            (clean_fqn(f"{path}.{name}" if path else name), module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._at_step: dict[str, tuple[int, int]] = {}
        look = weakref.WeakMethod(self._look)

        @functools.partial(untraced, with_callees=False)
        def after_step(*_: object) -> None:
            found = look()
            if found is not None:
                found()

        for optimizer in optimizers if self._places else ():
            if hasattr(optimizer, "register_step_post_hook"):
                weakref.finalize(self, optimizer.register_step_post_hook(after_step).remove)

    def _look(self) -> None:
        self._at_step = self._now()

    def _now(self) -> dict[str, tuple[int, int]]:
        """Return the identity of each buffer, and how often it was written, by name."""
        there = [(fqn, buffers.get(name)) for fqn, buffers, name in self._places]
        # An inference tensor does not count.
        return {fqn: (id(it), it._version) for fqn, it in there if it is not None and not it.is_inference()}

    def tell(self) -> None:
        """Warn if some were written since the last step, with their names; before the first step nobody knows."""
        before = self._at_step
        names = [name for name, now in self._now().items() if before.get(name, now) != now]
        if names:
            warnings.warn(
                f"the last checkpoint has the buffers {some_of(names, 3)} as they are now: they were written after the "
                "last optimizer step, as a forward pass does it with the statistics of batch norms, so a batch that is "
                "repeated counts twice in them",
                stacklevel=3,
            )


def save_after_failure(
    saver: Saver,
    ranks: ExchangesValues,
    averages: Mapping[tuple[str, ...], ShardedEMA],
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
        updates = {at: each.updates for at, each in averages.items()}
        place = _Place(survivors.steps, survivors.is_in_step, updates)
        places = survivors.exchange(place, label="meet for a last save")
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
        if place.updates != places[0].updates:
            told = [sorted(each.updates.values()) for each in (places[0], place)]
            raise CheckpointError(
                f"rank 0 has updated its averages {told[0]} times, and rank {rank} {told[1]} times: their parts of the "
                "averages are of different moments",
                rank=rank,
                hint=_HINT,
            )
