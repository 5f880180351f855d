"""The parts of a flat parameter that are in memory, and the legal steps between these states."""

from __future__ import annotations

import enum
from typing import Final

from flatparam_core.transitions import Transitions

__all__ = ["RESIDENCY", "Residency"]


class Residency(enum.Enum):
    """The parts of a flat parameter that are in memory on this rank."""

    SHARDED = "the shard"
    UNSHARDING = "the shard, and a full buffer that is being filled"
    UNSHARDED = "the shard, and the full parameters, which the module shows"

    # Enum's own hash is written in Python, and a table is looked up at every step.
    __hash__ = object.__hash__


RESIDENCY: Final = Transitions(
    "residency",
    {
        Residency.SHARDED: frozenset({Residency.UNSHARDING}),
        Residency.UNSHARDING: frozenset({Residency.UNSHARDED, Residency.SHARDED}),
        Residency.UNSHARDED: frozenset({Residency.SHARDED}),
    },
)
