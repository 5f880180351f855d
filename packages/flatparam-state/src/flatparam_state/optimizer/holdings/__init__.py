"""The parameters and groups that optimizers hold: that of this rank, and those of all ranks together."""

from flatparam_state.optimizer.holdings.groups import complete_groups, named_group, settings_of, with_settings
from flatparam_state.optimizer.holdings.held import (
    Held,
    Holding,
    held_by,
    held_parameters,
    innermost,
    numbered,
)
from flatparam_state.optimizer.holdings.inventory import (
    Hole,
    Inventory,
    agree_on_holdings,
    first_hole,
    group_numbers,
    with_states,
)

__all__ = [
    "Held",
    "Holding",
    "Hole",
    "Inventory",
    "agree_on_holdings",
    "complete_groups",
    "first_hole",
    "group_numbers",
    "held_by",
    "held_parameters",
    "innermost",
    "named_group",
    "numbered",
    "settings_of",
    "with_settings",
    "with_states",
]
