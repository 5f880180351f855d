"""The state of an optimizer over sharded parameters, by the names of the parameters; what add-ons use of it."""

from flatparam_state.optimizer.entry import AsItIs, PerRank, spread_out
from flatparam_state.optimizer.held import HOLDERS, Held, Holding, complete_groups, holding_parts, with_names
from flatparam_state.optimizer.inventory import Inventory, first_hole, group_numbers
from flatparam_state.optimizer.optimizer_load import load_optimizer_state

__all__ = [
    "AsItIs",
    "HOLDERS",
    "Held",
    "Holding",
    "Inventory",
    "PerRank",
    "complete_groups",
    "first_hole",
    "group_numbers",
    "holding_parts",
    "load_optimizer_state",
    "spread_out",
    "with_names",
]
