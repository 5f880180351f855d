"""The averages of a model's parameters, as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from flatparam_files import CheckpointError

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

__all__ = ["AVERAGES", "UPDATES", "averages_by_name", "tensors_of"]

AVERAGES: Final = "averages"
"""The first key of everything about averages."""
UPDATES: Final = "updates"
"""The last key of the number of updates."""
_TENSORS: Final = "model"


def tensors_of(at: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of the tensors of the averages at `at`: below them are the names that the model's tensors have."""
    return (*at, _TENSORS)


def averages_by_name(
    averages: ShardedEMA | Mapping[str, ShardedEMA] | None,
) -> dict[tuple[str, ...], ShardedEMA]:
    """Return the averages, by the keys under which they are in a checkpoint.

    Raises:
        CheckpointError: for a name that has a different meaning there.
    """
    if averages is None:
        return {}
    if not isinstance(averages, Mapping):
        return {(AVERAGES,): averages}
    for name in averages:
        if name in ("", _TENSORS, UPDATES):
            raise CheckpointError(
                f"{name!r} cannot be the name of averages", hint="give them a different one"
            )
    return {(AVERAGES, name): each for name, each in averages.items()}
