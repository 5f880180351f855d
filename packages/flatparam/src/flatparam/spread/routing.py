"""Torch's functions ask all ranks about sharded parameters."""

from __future__ import annotations

from flatparam.compat.clipping import note_parameters
from flatparam.spread.clipping import have_torch_clip
from flatparam.spread.scaling import have_torch_scalers_agree
from flatparam_runtime import Unit

__all__ = ["route_torchs_functions"]


def route_torchs_functions(unit: Unit) -> None:
    """Have torch's clipping and its loss scaler ask all ranks about the parameters of `unit`, if it has several ranks.

    The functions are changed in the whole process, once, and are as they were for all other parameters.
    """
    if unit.topology.shard.size > 1:
        have_torch_clip()
        have_torch_scalers_agree()
        for handle in unit.handles:
            note_parameters(handle.exposure.parameters())
