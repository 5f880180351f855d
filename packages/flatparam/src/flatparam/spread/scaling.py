"""Loss scaling by torch's own scaler, whose ranks have to skip the same steps."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flatparam.compat.patching import Patch
from flatparam.sharded_grad_scaler import ShardedGradScaler, agree, gradients_of
from flatparam.spread.parameters import unit_that_spreads
from flatparam_comm import Collectives

__all__ = ["have_torch_scalers_agree"]


@functools.cache
def have_torch_scalers_agree() -> None:
    """Have each `torch.amp.GradScaler` skip a step on all ranks if one rank finds a gradient that is not finite.

    That is for optimizers of sharded parameters, in the whole process. A second call does nothing.
    """
    # Torch's `unscale_`, and its fused steps, both come through here.
    torchs: Any = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(torchs)
    def unscale(
        self: Any, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = {} if isinstance(self, ShardedGradScaler) else _groups_of(optimizer)
        if groups and any(each.device.type == "cpu" for each in gradients_of(optimizer)):
            # Torch would copy them there without waiting.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, Tensor] = torchs(self, optimizer, inv_scale, found_inf, allow_fp16)
        if groups:
            # This rank may own no part of what is optimized; it is asked all the same.
            found = found or {found_inf.device: found_inf}
            agree(groups, list(found.values()))
        return found

    Patch(torch.amp.GradScaler, "_unscale_grads_", unscale).put()


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[Collectives, torch.device]:
    """The groups over which parameters of `optimizer` are sharded, in the order of its list, with their device."""
    groups: dict[Collectives, torch.device] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        unit = unit_that_spreads(parameter)
        if unit is not None:
            groups.setdefault(unit.topology.shard, unit.device)
    return groups
