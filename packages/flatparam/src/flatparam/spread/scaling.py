"""Loss scaling by torch's own scaler, whose ranks have to skip the same steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flatparam.compat.patching import Patch
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.spread.parameters import unit_that_spreads
from flatparam_comm import Collectives, ReduceOp

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
        if groups and any(each.device.type == "cpu" for each in _gradients_of(optimizer)):
            # Torch would copy them there without waiting.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, Tensor] = torchs(self, optimizer, inv_scale, found_inf, allow_fp16)
        if groups:
            # This rank may own no part of what is optimized; it is asked all the same.
            found = found or {found_inf.device: found_inf}
            _agree(groups, list(found.values()))
        return found

    Patch(torch.amp.GradScaler, "_unscale_grads_", unscale).put()


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[Collectives, torch.device]:
    """The groups over which parameters of `optimizer` are sharded, in the order of its list, with their device."""
    groups: dict[Collectives, torch.device] = {}
    for parameter in _parameters_of(optimizer):
        unit = unit_that_spreads(parameter)
        if unit is not None:
            groups.setdefault(unit.topology.shard, unit.device)
    return groups


def _agree(groups: Mapping[Collectives, torch.device], found: Sequence[Tensor]) -> None:
    """Set all of `found` to 1 if any of them is, on any rank; one element each, whatever their devices."""
    for group, device in groups.items():
        agreed = torch.stack([flag.to(device).reshape(()) for flag in found]).amax()
        group.all_reduce(agreed, op=ReduceOp.MAX, label="found_inf").wait()
        for flag in found:
            flag.copy_(agreed)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter.grad for parameter in _parameters_of(optimizer) if parameter.grad is not None)
