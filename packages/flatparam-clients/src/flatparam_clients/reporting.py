"""The state of a wrapper in FSDP1's words, as programs ask for it."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from flatparam.wrapper.interior import Interior
from flatparam_clients.training_state import HandleTrainingState, TrainingState

__all__ = ["check_state", "handle_state_of", "reporting", "state_of"]

_LOGGER = logging.getLogger("flatparam")
_REPORTED: Final[WeakKeyDictionary[Interior, tuple[TrainingState, HandleTrainingState]]] = WeakKeyDictionary()
"""The states that a program has a wrapper tell, instead of its own."""


def state_of(interior: Interior) -> TrainingState:
    """Return the wrapper's state, or the one that `reporting` has it tell."""
    return _REPORTED[interior][0] if interior in _REPORTED else TrainingState.of(interior.unit)


def handle_state_of(interior: Interior) -> HandleTrainingState:
    """Return the state of the wrapper's flat parameters, or the one that `reporting` has it tell."""
    return _REPORTED[interior][1] if interior in _REPORTED else HandleTrainingState.of(interior.unit)


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
    before = _REPORTED.get(interior)
    _REPORTED[interior] = state, handle_state
    try:
        yield
    finally:
        if before is None:
            del _REPORTED[interior]
        else:
            _REPORTED[interior] = before
