"""The state of an optimizer over sharded parameters, by the names of the parameters."""

from flatparam_state.optimizer.collect import optimizer_state_dict
from flatparam_state.optimizer.entries import AsItIs, PerRank
from flatparam_state.optimizer.first_state import FirstState
from flatparam_state.optimizer.holdings import (
    Held,
    Holding,
    Inventory,
    complete_groups,
    first_hole,
    group_numbers,
    held_by,
    held_parameters,
)
from flatparam_state.optimizer.load import load_optimizer_state
from flatparam_state.optimizer.quantised import spread_out

__all__ = [
    "AsItIs",
    "FirstState",
    "Held",
    "Holding",
    "Inventory",
    "PerRank",
    "complete_groups",
    "first_hole",
    "group_numbers",
    "held_by",
    "held_parameters",
    "load_optimizer_state",
    "optimizer_state_dict",
    "spread_out",
]
