"""The norm of gradients that are spread over ranks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamHandle, ReduceOp, streams_of
from flatparam_runtime.agreement.divergence import note_between_passes
from flatparam_runtime.agreement.nonfinite import nonfinite_names
from flatparam_runtime.unit import Unit, device_of, held_in, holder_of, units_in

Groups: TypeAlias = tuple[Collectives, ...]
#: The gradients of a rank, and the ranks, that the error of a norm names.
_TOLD: Final = 3


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `module` down to a total norm of at most `max_norm`; every rank calls it.

    A sharded gradient counts with the parts of all ranks, also those of tensor parallelism; any other counts once.
    Norms are computed in fp32, or in float64 if some gradient is.

    Args:
        error_if_nonfinite: raise, on every rank, instead of scaling by a total that is infinite or not a number.
        foreach: scale all gradients in one call; by default if they are on one device.

    Returns:
        The total norm before scaling, 0-d, the same on every rank, in the widest dtype that the gradients of trainable
        parameters have, also if this rank has none of them.

    Raises:
        RuntimeError: if the total is not finite, and `error_if_nonfinite` is set; no gradient has changed then.
        ValueError: if `norm_type` is 0 or not a number.
    """
    handles = [handle for unit in units_in(module) for handle in unit.handles]
    held = {id(parameter) for handle in handles for parameter in handle.exposure.listed()}
    parameters = [parameter for handle in handles for parameter in handle.exposure.parameters()]
    parameters += [parameter for parameter in module.parameters() if id(parameter) not in held]
    if all(each.grad is None for each in parameters) and any(each.numel() for each in module.parameters()):
        warnings.warn(
            "clip_grad_norm_ found no gradient on this rank: call it after backward() and before zero_grad(); the norm "
            "is that of the other ranks, or zero",
            stacklevel=3,
        )
    return clip_gradients_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)


def clip_gradients_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `parameters` down to a total norm of at most `max_norm`; every rank calls it.

    Args:
        parameters: the same on every rank, in one order, also if this rank has no gradient. Those of units count with
            the parts of all ranks, any other once. Ranks compare `max_norm` and `norm_type` at the end of their next
            pass.
        error_if_nonfinite: see `clip_grad_norm_`.
        foreach: see `clip_grad_norm_`.

    Returns:
        The total norm before scaling, as `clip_grad_norm_` returns it; on the CPU if shards are offloaded.

    Raises:
        RuntimeError: if the total is not finite, and `error_if_nonfinite` is set; no gradient has changed then.
        ValueError: if `norm_type` is 0 or not a number.
    """
    if not norm_type or math.isnan(norm_type):
        raise ValueError(f"expected the order of a norm, such as 2.0 or inf, found norm_type={norm_type!r}")
    sharded: dict[Groups, list[Tensor]] = {}
    whole: list[Any] = []
    holders: dict[Unit, None] = {}
    dtypes: set[torch.dtype] = set()
    seen: set[int] = set()
    for parameter in parameters:
        gradient, owner = parameter.grad, held_in(parameter)
        is_new = gradient is not None and id(gradient) not in seen
        seen.add(id(gradient))
        unit = None if owner is None else holder_of(owner[0])
        if owner is not None and unit is not None:
            holders[unit] = None
            # A zero of the padding would make a norm of negative order zero.
            for others, part in _parts_of(parameter, owner[0], padded=norm_type > 0):
                sharded.setdefault((unit.topology.shard, *others), []).extend([part] if is_new else [])
        elif is_new:
            whole.append(gradient)
        # A rank may have no gradient where other ranks have one. The norm of complex numbers is a real one.
        if gradient is not None or parameter.requires_grad:
            dtype = parameter.dtype if gradient is None else gradient.dtype
            dtypes.add((dtype if owner is None else owner[0].precision.grad(owner[0].layout.dtype)).to_real())
    units = [*holders]
    # Behind the checks: what was refused on one rank has not happened.
    note_between_passes(units, f"clip_grad_norm_(max_norm={_told(max_norm)}, norm_type={norm_type!r})")
    sums = next((unit.reducer.sums for unit in units if unit.reducer.sums is not None), None)
    device = device_of(units) if units else next((g.device for g in whole), torch.device("cpu"))
    if sums is not None and not math.isinf(norm_type):
        total = sums.norm(sharded, whole, norm_type, device)
    else:
        # The same on every rank, also on one without gradients.
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        parts = {over: _norm(gradients, norm_type, device, dtype) for over, gradients in sharded.items()}
        known = [_norm(whole, norm_type, device, dtype)] if whole or not parts else []
        known += _across_groups(parts, norm_type)
        # The norm of one number of it may differ from it in the last digit.
        total = known[0] if len(known) == 1 else torch.linalg.vector_norm(torch.stack(known), norm_type)
    if any(handle.is_offloaded for unit in units for handle in unit.handles):
        # Where the gradients are, as in FSDP1: the host has to wait for the factor in any case.
        total = total.cpu()
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            f"clipped{_blame(units)}; look for the step at which a loss or a gradient became infinite, or pass "
            "error_if_nonfinite=False"
        )
    everything = [g for gradients in sharded.values() for g in gradients] + whole
    _scale(everything, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach)
    return total.to(functools.reduce(torch.promote_types, dtypes or {total.dtype}))


def _told(value: object) -> str:
    """Return a number in words; reading a tensor on an accelerator would wait for it."""
    if isinstance(value, Tensor):
        return "a tensor" if value.device.type != "cpu" or value.numel() != 1 else repr(value.item())
    return repr(value)


def _blame(units: Sequence[Unit]) -> str:
    """Return the first gradients of each rank that are not finite; every rank calls it."""
    if not units:
        return ""
    found = [name for unit in units for name in nonfinite_names(unit)]
    everyone = units[0].topology.exchange(found[:_TOLD], label="gradients that are not finite")
    told = [f"rank {rank} has such a gradient of {', '.join(names)}" for rank, names in enumerate(everyone) if names]
    return f" ({'; '.join(told[:_TOLD])})" if told else ""


def _scale(gradients: Sequence[Tensor], factor: Tensor, foreach: bool | None) -> None:
    kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
    if foreach or (foreach is None and len(kinds) == 1):
        for device, dtype in kinds:
            of_kind = [g for g in gradients if (g.device, g.dtype) == (device, dtype)]
            torch._foreach_mul_(of_kind, factor.to(device, dtype))
    else:
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))


def _parts_of(parameter: Any, handle: FlatParamHandle, *, padded: bool) -> Iterator[tuple[Groups, Any]]:
    """Yield the gradient of `parameter` with the groups, beside data parallelism, whose ranks hold other parts of it.

    If not `padded`, a flat parameter's is without its padding, in pieces.
    """
    meshes: Any = handle.forms.meshes
    if meshes is not None:
        yield from meshes.gradients([parameter], padded=padded)
        return
    is_one = padded or parameter is not handle.flat_param
    yield from (((), part) for part in ((parameter.grad,) if is_one else grad_parts(handle)))


def grad_parts(handle: FlatParamHandle) -> list[Tensor | None]:
    """Return this rank's part of each parameter's gradient, as views of `.grad`; `None` for a parameter without one."""
    parameters = handle.exposure.parameters()
    if parameters[0] is not handle.flat_param:
        return [None if parameter.grad is None else parameter.grad for parameter in parameters]
    grad = handle.flat_param.grad
    fragments = handle.layout.fragments(handle.rank)
    return [None if grad is None else grad[fragment.in_shard.as_slice()] for fragment in fragments]


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    # An empty gradient does not have a norm of every type.
    norms = [
        torch.linalg.vector_norm(g.detach(), norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g.numel()
    ]
    if not norms:
        # It counts as nothing in the norm of all.
        return torch.full((), math.inf if norm_type < 0 else 0.0, dtype=dtype, device=device)
    if len({norm.device for norm in norms}) == 1:
        # One copy is enough for all.
        together = torch.stack([norm.to(dtype) for norm in norms])
        if together.device != device:
            together = streams_of(device).to_device(together, device)
    else:
        together = torch.stack([norm.to(device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    return total


def _across_groups(parts: Mapping[Groups, Tensor], norm_type: float) -> Sequence[Tensor]:
    """Combine the ranks' norms of their parts to the norms of the whole: one exchange for each group."""
    norms = list(parts.values())
    for group in dict.fromkeys(group for groups in parts for group in groups if group.size > 1):
        asked = [number for number, groups in enumerate(parts) if group in groups]
        combined = _across(group, torch.stack([norms[number] for number in asked]), norm_type)
        for number, norm in zip(asked, combined.unbind(), strict=True):
            norms[number] = norm
    return norms


def _across(group: Collectives, local: Tensor, norm_type: float) -> Tensor:
    """Combine the ranks' norms of their parts to the norm of the whole."""
    if math.isinf(norm_type):
        # A maximum of floats may lose what is not a number: gloo's does. As integers, the bits of numbers that are not
        # negative have the same order, and those of what is not a number come after infinity.
        bits = local.abs().view(torch.int64 if local.dtype == torch.float64 else torch.int32)
        # The minimum is that of the negative ones' maximum.
        bits = bits if norm_type > 0 else bits.neg()
        group.all_reduce(bits, op=ReduceOp.MAX, label="gradient norm").wait()
        return (bits if norm_type > 0 else bits.neg()).view(local.dtype)
    power = local.pow(norm_type)
    group.all_reduce(power, label="gradient norm").wait()
    return power.pow(1.0 / norm_type)
