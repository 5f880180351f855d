"""The parameters that are spread over ranks, so that this rank has a part of each."""

from __future__ import annotations

from typing import Any

from flatparam_runtime import Unit, holder_of_parameter

__all__ = ["unit_that_spreads"]


def unit_that_spreads(parameter: Any) -> Unit | None:
    """Return the unit that holds `parameter`, if it has several ranks to hold it; `None` for any other.

    A parameter that is a `DTensor` answers for all ranks itself: torch's functions are right about it.
    """
    unit = holder_of_parameter(parameter)
    return (
        None if unit is None or unit.topology.shard.size == 1 or hasattr(parameter, "_local_tensor") else unit
    )
