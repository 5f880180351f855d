"""Torch's functions and optimizers that would take a rank's part of a parameter for the whole."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flatparam.compat.clipping import note_parameters
from flatparam.compat.patching import Patch
from flatparam.spread.clipping import have_torch_clip
from flatparam.spread.parameters import unit_that_spreads
from flatparam.spread.scaling import have_torch_scalers_agree
from flatparam_core import FlatParamError
from flatparam_runtime import Unit

__all__ = ["route_torchs_functions"]


def route_torchs_functions(unit: Unit) -> None:
    """Have torch's clipping and its loss scaler ask all ranks about the parameters of `unit`, if it has several ranks.

    Torch's `ZeroRedundancyOptimizer`, which shards an optimizer itself, refuses them. The functions are changed in the
    whole process, once, and are as they were for all other parameters.
    """
    if unit.topology.shard.size > 1:
        have_torch_clip()
        have_torch_scalers_agree()
        _have_joinable_optimizers_refuse()
        for handle in unit.handles:
            note_parameters(handle.exposure.parameters())


@functools.cache
def _have_joinable_optimizers_refuse() -> None:
    """Have `ZeroRedundancyOptimizer`, as the kind of optimizer that can be joined, refuse sharded parameters.

    Its constructor calls that of its base class when it has its parameters, and before it does anything with them. To
    import its own module takes longer than to wrap a model.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.algorithms.join import Joinable

    torchs: Any = Joinable.__init__

    @functools.wraps(torchs)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(self, torch.optim.Optimizer):
            _refuse_sharded(self)
        torchs(self, *arguments, **named)

    Patch(Joinable, "__init__", init).put()


def _refuse_sharded(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            unit = unit_that_spreads(parameter)
            if unit is not None:
                kind = type(optimizer).__name__
                raise FlatParamError(
                    f"rank {unit.topology.rank}: {kind} was given parameters of unit {unit.name!r}, of which this rank "
                    "holds a part; it would send parts as if they were the whole. The states of every optimizer of "
                    "these parameters are sharded already: give them to the optimizer itself, such as "
                    "torch.optim.AdamW"
                )
