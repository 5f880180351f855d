"""The ranks that a wrapper's parameters are sharded over."""

from __future__ import annotations

from typing import Any

from flatparam_comm import Collectives, RanksOnly, engine_of, process_group_of
from flatparam_runtime import Unit

__all__ = ["copies", "process_group", "ranks_of"]


def ranks_of(unit: Unit) -> Collectives:
    """The ranks that the parameters are sharded over, or, if they are not sharded, those that hold copies of them."""
    return unit.topology.group


def process_group(unit: Unit) -> Any:
    """Return the same as torch's process group, or as what stands for it."""
    return _as_torchs(ranks_of(unit))


def copies(unit: Unit) -> Any:
    """Return the ranks that hold copies of this rank's shard, in the same form.

    Raises:
        AttributeError: if there are none, as FSDP1's wrapper has no such attribute then.
    """
    replicate = unit.topology.replicate
    if replicate is None or unit.topology.shard.size == 1:
        raise AttributeError("only the hybrid strategies have ranks that hold copies of a shard")
    return _as_torchs(replicate)


def _as_torchs(ranks: Collectives) -> Any:
    engine = engine_of(ranks)
    return engine.group if isinstance(engine, RanksOnly) else process_group_of(engine) or engine
