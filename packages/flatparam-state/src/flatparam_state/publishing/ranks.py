"""The ranks of the model that is published."""

from __future__ import annotations

from torch import nn

from flatparam_runtime import SingleCollectives, Topology, units_in

__all__ = ["topology_of"]


def topology_of(model: nn.Module) -> Topology:
    """The ranks of `model`; this one alone if it is not sharded."""
    units = units_in(model)
    return units[0].topology if units else Topology(SingleCollectives())
