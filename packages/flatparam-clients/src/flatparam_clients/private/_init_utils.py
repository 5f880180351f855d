"""FSDP1's module of constructors: its one name that programs read."""

from __future__ import annotations

from typing import Final

from flatparam.api import ShardingStrategy

__all__ = ["HYBRID_SHARDING_STRATEGIES"]

HYBRID_SHARDING_STRATEGIES: Final = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
"""The strategies that shard over some ranks and hold copies over others."""
