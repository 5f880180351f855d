"""A last save after a rank has failed: the ranks meet without a collective, and compare where each of them stands."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatparam_checkpoint.agreement import some_of
from flatparam_checkpoint.save.save_session import Saver
from flatparam_checkpoint.save.subject import Subject
from flatparam_comm import survivors_of
from flatparam_files import CheckpointError
from flatparam_files.checkpoint.fields import check_step
from flatparam_runtime import Collectives, ExchangesValues, clean_fqn, untraced

_HINT: Final = "resume from the latest checkpoint"


@final
@attrs.frozen
class _Place:
    """Where a rank stands."""

    steps: int
    """The optimizer steps that its process has done."""
    watched: Mapping[tuple[str, ...], int]
    """Those of each optimizer that is saved, also compiled ones, if the rank has a part of what it steps."""
    is_in_step: bool
    """Whether one was not completed."""
    is_uncounted: bool
    """Whether parameters have changed, and no step was seen: they were written by hand."""
    updates: Mapping[tuple[str, ...], int]
    """How often each average was updated."""


@final
class StepWatch:
    """Notices the steps of optimizers, and what was written after the last one, as a forward pass writes buffers."""

    def __init__(self, subject: Subject) -> None:
        """Look from now on."""
        self._subject = subject
        self._steps = dict.fromkeys(subject.optimizers, 0)
        self._has_seen_any = False
        modules = [] if subject.model is None else subject.model.named_modules()
        self._places = [
            (clean_fqn(f"{path}.{name}" if path else name), module._buffers, name)
            for path, module in modules
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._at_step: dict[str, tuple[int, int]] = {}
        self.begin()
        with _LOCK:
            _call_after_steps()
            _WATCHES.add(self)

    def begin(self) -> None:
        """Take the parameters as they are now for those that a step begins with."""
        self._at_first = self._parameters()

    def note(self, optimizer: Any) -> None:
        """Count a step of `optimizer`, which has just ended."""
        self._has_seen_any = True
        for at, each in self._subject.optimizers.items():
            self._steps[at] += each is optimizer
        self._at_step = self._written_buffers()

    def _parameters(self) -> dict[int, int]:
        """Return how often each parameter of the optimizers was written, by its identity."""
        held = itertools.chain(*map(_held_by, self._subject.optimizers.values()))
        return {id(each): each._version for each in held}

    def _written_buffers(self) -> dict[str, tuple[int, int]]:
        """Return the identity of each buffer of the state, and how often it was written, by name."""
        there = [(fqn, buffers.get(name)) for fqn, buffers, name in self._places]
        # An inference tensor does not count.
        return {fqn: (id(it), it._version) for fqn, it in there if it is not None and not it.is_inference()}

    @property
    def steps(self) -> dict[tuple[str, ...], int]:
        """The steps of each optimizer that is saved, and has elements here: others need not step."""
        own = self._subject.optimizers.items()
        return {at: self._steps[at] for at, each in own if any(map(Tensor.numel, _held_by(each)))}

    @property
    def is_uncounted(self) -> bool:
        """Whether parameters were written, and no optimizer of torch has stepped."""
        before = self._at_first
        return not self._has_seen_any and any(before.get(it, now) != now for it, now in self._parameters().items())

    def tell(self) -> None:
        """Warn if buffers were written since the last step, with their names; before the first step nobody knows."""
        before = self._at_step
        names = [name for name, now in self._written_buffers().items() if before.get(name, now) != now]
        if names:
            warnings.warn(
                f"the last checkpoint has the buffers {some_of(names, 3)} as they are now: they were written after the "
                "last optimizer step, as a forward pass does it with the statistics of batch norms, so a batch that is "
                "repeated counts twice in them",
                stacklevel=3,
            )


_WATCHES: Final[weakref.WeakSet[StepWatch]] = weakref.WeakSet()
_LOCK: Final = threading.Lock()
"""Ranks that are threads make watches, and step, at the same time."""


@functools.cache
def _call_after_steps() -> None:
    """Have every watch told of each step, by one hook: torch may go through its hooks while watches come and go."""
    register_optimizer_step_post_hook(_after_step)


@untraced
def _after_step(optimizer: Any, *_: object) -> None:
    with _LOCK:
        watches = [*_WATCHES]
    for watch in watches:
        watch.note(optimizer)


def _held_by(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def save_after_failure(
    saver: Saver,
    ranks: ExchangesValues,
    subject: Subject,
    watch: StepWatch,
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
        updates = {at: each.updates for at, each in subject.averages.items()}
        place = _Place(survivors.steps, watch.steps, survivors.is_in_step, watch.is_uncounted, updates)
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
        counted = {at: (places[0].watched.get(at, steps), steps) for at, steps in place.watched.items()}
        for first, other in ((places[0].steps, place.steps), *counted.values()):
            if other != first:
                raise CheckpointError(
                    f"rank 0 has done {first} optimizer steps, and rank {rank} {other}: their parts of the model are "
                    "of different moments",
                    rank=rank,
                    hint=_HINT,
                )
        if place.is_uncounted:
            raise CheckpointError(
                f"rank {rank}: its parameters have changed, and no optimizer has stepped: if they are written by hand, "
                "nobody knows whether the ranks' parts of the model are of one moment",
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
