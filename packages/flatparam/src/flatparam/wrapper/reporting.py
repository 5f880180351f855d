"""The state of a wrapper in FSDP1's words, as programs ask for it."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator, Sequence

from torch import nn

from flatparam.wrapper.interior import Interior
from flatparam.wrapper.training_state import HandleTrainingState, TrainingState

__all__ = ["check_state", "handle_state_of", "reporting", "state_of"]

_LOGGER = logging.getLogger(__name__)


def state_of(interior: Interior) -> TrainingState:
    """The wrapper's state, or the one that `reporting` has it tell."""
    return TrainingState.of(interior.unit) if interior.reported is None else interior.reported[0]


def handle_state_of(interior: Interior) -> HandleTrainingState:
    """The state of the wrapper's flat parameters, or the one that `reporting` has it tell."""
    return HandleTrainingState.of(interior.unit) if interior.reported is None else interior.reported[1]


def check_state(
    wrapper: nn.Module, interior: Interior, state: TrainingState | Sequence[TrainingState]
) -> None:
    """Make sure that the wrapper is in one of the states that are expected; otherwise rank 0 logs it, too.

    Raises:
        ValueError: naming the states.
    """
    expected = [state] if isinstance(state, enum.Enum) else list(state)
    found = state_of(interior)
    if found in expected:
        return
    unit = interior.unit
    message = f"unit {unit.name!r}: expected to be in {expected}, found {found}"
    if unit.topology.group.rank == 0:
        _LOGGER.error("%s: %s", message, wrapper)
    raise ValueError(message)


@contextlib.contextmanager
def reporting(interior: Interior, state: TrainingState, handle_state: HandleTrainingState) -> Iterator[None]:
    """Have the wrapper tell these states inside; what its unit does follows from the unit's own phase."""
    before, interior.reported = interior.reported, (state, handle_state)
    try:
        yield
    finally:
        interior.reported = before
