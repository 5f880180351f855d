"""What is in memory of a flat parameter, and what may follow on what."""

from __future__ import annotations

import enum
from typing import Final

from flatparam_core.transitions import Transitions

__all__ = ["RESIDENCY", "Residency"]


class Residency(enum.Enum):
    """What is in memory of a flat parameter on this rank."""

    SHARDED = "the shard"
    UNSHARDING = "the shard, and a full buffer that is being filled"
    UNSHARDED = "the shard, and the full parameters, which the module shows"

    __hash__ = object.__hash__  # Enum's own is written in Python, and a table is looked up at every step


RESIDENCY: Final = Transitions(
    "residency",
    {
        Residency.SHARDED: frozenset({Residency.UNSHARDING}),
        Residency.UNSHARDING: frozenset({Residency.UNSHARDED, Residency.SHARDED}),
        Residency.UNSHARDED: frozenset({Residency.SHARDED}),
    },
)
