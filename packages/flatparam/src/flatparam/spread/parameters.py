"""The parameters that are spread over ranks, so that this rank has a part of each."""

from __future__ import annotations

from typing import Any

from flatparam_core import FlatParameter, handle_of, owner_of
from flatparam_runtime import Unit, holder_of

__all__ = ["unit_that_holds", "unit_that_spreads"]


def unit_that_holds(parameter: Any) -> Unit | None:
    """The unit that holds `parameter`, or that has the flat parameter; `None` for any other."""
    if isinstance(parameter, FlatParameter):
        handle = handle_of(parameter)
    else:
        owner = owner_of(parameter)
        handle = None if owner is None else owner[0]
    return None if handle is None else holder_of(handle)


def unit_that_spreads(parameter: Any) -> Unit | None:
    """The unit that holds `parameter`, if it has several ranks to hold it; `None` for any other."""
    unit = unit_that_holds(parameter)
    return None if unit is None or unit.topology.shard.size == 1 else unit
