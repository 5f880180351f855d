"""Loss scaling for sharded training: if one rank finds an infinite gradient, every rank skips the step."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_comm import Collectives, ProcessGroupCollectives, ReduceOp, current_collectives, resolve_topology
from flatparam_runtime import note_step_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = ProcessGroup | Collectives | DeviceMesh

__all__ = ["ShardedGradScaler"]

Outputs = TypeVar("Outputs", bound="Tensor | Iterable[Any]")


class ShardedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose ranks decide together, because each rank only holds a part of the gradients.

    Scale the loss, call `step`, and call `update`, as with torch's scaler. In addition, outputs keep their dtype, which
    is narrow under mixed precision. Gradients may be fp16, sparse, missing on this rank, or partly on the CPU and
    partly on an accelerator. An optimizer with its own scaling (a fused one) gets the scale on which the ranks agreed.

    Args:
        device: the device type of the loss; gradients may be elsewhere.
        init_scale: the first scale, by which losses are multiplied.
        backoff_factor: the factor of the scale after a step that was skipped.
        growth_factor: the factor of the scale after `growth_interval` steps in a row that were not skipped.
        growth_interval: counted in steps.
        enabled: a disabled scaler does nothing, without communication.
        process_group: the ranks that decide together: a process group, a mesh, `Collectives`, or a sequence of these,
            of which one after the other is asked (as for a shard group and a replicate group). `None` is whatever
            there is when gradients are unscaled: the world of threads, else torch's default group, else this rank.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group | Sequence[Group] | None = None,
    ) -> None:
        """Make a scaler; every rank makes an equal one."""
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or every tensor in a structure, by the scale; each keeps its dtype.

        Lists, tuples and mappings keep their type; any other iterable becomes an iterator.

        Raises:
            ValueError: if `outputs` contains anything that is neither a tensor nor iterable.
        """
        if not self._enabled:
            return outputs
        scaled: Outputs = self._scaled(outputs, {})
        return scaled

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale to `new_scale`, a number or a tensor of one element, or adapt it to skipped steps.

        Every rank calls this method, with the same scale.

        Raises:
            TypeError: if `new_scale` is anything else.
        """
        if not self._enabled:
            return
        if isinstance(new_scale, Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.detach().to(self._device).reshape(())
        elif isinstance(new_scale, numbers.Real):
            new_scale = float(new_scale)
        elif new_scale is not None:
            raise TypeError(f"expected a number or a tensor of one element as the new scale, found {new_scale!r}")
        super().update(new_scale)

    def _scaled(self, value: Any, scales: dict[torch.device, Tensor]) -> Any:
        """`value` times the scale, of which `scales` collects a copy for each device."""
        if isinstance(value, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(value.device)
            assert self._scale is not None, "it was just made"
            if value.device not in scales:
                # A copy to the host that does not block would be read before it has landed.
                scales[value.device] = self._scale.to(value.device, non_blocking=value.device.type != "cpu")
            return (value * scales[value.device]).to(value.dtype)
        if isinstance(value, Mapping):
            # A copy keeps the type, and what the mapping was made with.
            scaled: Any = copy.copy(value)
            for key, item in value.items():
                scaled[key] = self._scaled(item, scales)
            return scaled
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise ValueError(f"expected tensors, or a structure of tensors, to scale, found {value!r}")
        items = (self._scaled(item, scales) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(items)
        return type(value)(items) if isinstance(value, (list, tuple)) else items

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and find out on which ranks one is not finite; every rank calls it."""
        self._take_part(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, unless a gradient of any rank is not finite; every rank calls it."""
        self._take_part(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _take_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin on a rank that has had no loss to scale, and has its part of the other ranks' gradients."""
        if self._enabled and self._scale is None and next(gradients_of(optimizer), None) is not None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients, and tell for each device whether any rank found one that is not finite.

        Torch's unscaling and torch's fused steps both come through here.
        """
        # On an accelerator the host would have to wait for the scale.
        scale = f" by {inv_scale.item()!r}" if inv_scale.device.type == "cpu" else ""
        note_step_of(optimizer, f"unscale_() of {type(optimizer).__name__}{scale}")
        _coalesce_fp16(optimizer)
        if any(gradient.device.type == "cpu" for gradient in gradients_of(optimizer)):
            # Torch would copy them there without waiting.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
        # This rank may own no part of what is optimized; it is asked all the same.
        found = found or {found_inf.device: found_inf}
        device = next(iter(found))
        # The group of an accelerator may not reach the CPU.
        if device.type == "cpu":
            device = torch.device(self._device)
        agree(dict.fromkeys(self._groups(), device), list(found.values()))
        return found

    def _groups(self) -> list[Collectives]:
        """Return the groups to agree in; none if this rank is alone."""
        given = self.process_group
        if given is None:
            here = current_collectives()
            if here is None and dist.is_available() and dist.is_initialized():
                here = ProcessGroupCollectives()
            return [] if here is None else [here]
        several: Any = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        topologies = [resolve_topology(one) for one in several]
        return [group for topology in topologies for group in topology.groups]


def agree(groups: Mapping[Collectives, torch.device], found: Sequence[Tensor]) -> None:
    """Set all of `found` to 1 if any of them is, on any rank; one element each, whatever their devices.

    One collective for each group, on the group's device, however many devices a rank has gradients on: that number may
    differ between ranks.
    """
    for group, device in groups.items():
        agreed = torch.stack([flag.to(device).reshape(()) for flag in found]).amax()
        group.all_reduce(agreed, op=ReduceOp.MAX, label="found_inf").wait()
        for flag in found:
            flag.copy_(agreed)


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the gradients of the parameters of `optimizer` that have one."""
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def _coalesce_fp16(optimizer: torch.optim.Optimizer) -> None:
    """Add up in fp32 the values that a sparse fp16 gradient has for one place; what fp16 cannot hold is infinite."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and gradient.dtype is torch.float16:
                parameter.grad = gradient.float().coalesce().half()
