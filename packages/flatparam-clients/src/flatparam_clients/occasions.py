"""What client programs need when a model is sharded: the wrapper calls these functions, if this package is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flatparam_clients.averaged_copies import guard_averages
from flatparam_clients.unloading import guard_adapters

__all__ = ["WHEN_WRAPPED", "unit_made", "wrapped"]

WHEN_WRAPPED: Final[list[Callable[[], None]]] = []
"""Each is called when a wrapper is made; other libraries may have been imported since `install`."""


def unit_made() -> None:
    """Have the functions of other libraries that know nothing of shards refuse sharded models."""
    guard_adapters()
    guard_averages()


def wrapped() -> None:
    """Call each function of `WHEN_WRAPPED`."""
    for notice in WHEN_WRAPPED:
        notice()
