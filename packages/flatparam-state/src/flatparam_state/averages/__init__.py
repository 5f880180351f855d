"""Averages of a sharded model's parameters, each rank's part on that rank."""

from flatparam_state.averages.ema import ShardedEMA

__all__ = ["ShardedEMA"]
