"""A model at rest: each rank has its shards, and nobody uses full parameters."""

from __future__ import annotations

from torch import nn

from flatparam_runtime import FlatParamError, Phase, refuse_in_a_pass, units_in

__all__ = ["bring_to_rest"]


def bring_to_rest(model: nn.Module) -> None:
    """Free the full parameters of `model`, none of whose units may be in use.

    Raises:
        FlatParamError: inside a forward or backward pass, or inside `summon_full_params`.
    """
    for unit in units_in(model):
        refuse_in_a_pass(unit)
        if unit.showing.pins or unit.phase is Phase.INSPECTING:
            raise FlatParamError(
                f"unit {unit.name!r}: its shards are not saved, loaded, published or moved while full parameters are "
                "summoned; leave summon_full_params() first"
            )
        unit.reshard()
        unit.take_over()
