"""The entries of an optimizer's state: how they are copied and compared, and those that differ between ranks."""

from flatparam_state.optimizer.entries.entry import AsItIs, State, copy_value, is_equal
from flatparam_state.optimizer.entries.per_rank import PER_RANK, PerRank, is_per_rank

__all__ = ["PER_RANK", "AsItIs", "PerRank", "State", "copy_value", "is_equal", "is_per_rank"]
