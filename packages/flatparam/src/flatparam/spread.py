"""Parameters that are spread over ranks, and torch's functions that would take a rank's part for the whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatparam.compat import Patch, inner_of
from flatparam.sharded_grad_scaler import ShardedGradScaler, agree, gradients_of
from flatparam_core import FlatParamError
from flatparam_runtime import Collectives, Unit, clip_gradients_, holder_of_parameter


def _unit_that_spreads(parameter: Any) -> Unit | None:
    """Return the unit that holds `parameter`, if it has several ranks to hold it, or sums of its own; else `None`.

    A parameter that is a `DTensor` answers for all ranks itself: torch's functions are right about it.
    """
    unit = holder_of_parameter(parameter)
    if unit is None or hasattr(parameter, "_local_tensor"):
        return None
    is_alone = unit.topology.shard.size == 1 and not any(h.forms.meshes for h in unit.handles)
    return None if is_alone and unit.reducer.sums is None else unit


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the total norm of the gradients of `parameters` over all ranks; every rank calls it.

    The arguments are those of `torch.nn.utils.clip_grad_norm_`, and mean the same for the whole parameters. A sharded
    gradient counts with the parts of all ranks; a parameter that is not sharded counts once.

    Args:
        parameters: the same parameters, in the same order, on every rank; some, or all, or none of them are sharded.
        max_norm: the norm to scale down to.
        norm_type: the order of the norm; `float("inf")` is the largest element.
        error_if_nonfinite: if the norm is not finite, raise on every rank, and change nothing.
        foreach: see `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before clipping: 0-d, the same on every rank, in the widest dtype of the gradients.

    Raises:
        RuntimeError: if the norm is not finite, and `error_if_nonfinite` is set.
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return clip_gradients_(
        map(_part_of, given),
        float(max_norm),
        float(norm_type),
        error_if_nonfinite=error_if_nonfinite,
        foreach=foreach,
    )


def _part_of(parameter: Any) -> Any:
    """Return the plain parameter behind one that is shown as a `DTensor`; any other is returned as it is."""
    return getattr(parameter, "original", parameter)


def _has_both(parameters: Iterable[Any]) -> bool:
    """Return whether some parameters are shown as `DTensor`s, and others are plain: torch refuses to add up these."""
    kinds = [(_part_of(each) is not each, hasattr(each, "_local_tensor")) for each in parameters if each.requires_grad]
    return any(is_shown for is_shown, _ in kinds) and not all(is_dtensor for _, is_dtensor in kinds)


def _is_spread(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and _unit_that_spreads(parameter) is not None


_SPREAD: Final[weakref.WeakValueDictionary[int, nn.Parameter]] = weakref.WeakValueDictionary()
"""The parameters whose gradients are parts, by identity: a set would compare tensors."""


@functools.cache
def _have_torch_clip() -> None:
    """Have `torch.nn.utils.clip_grad_norm_` call `clip_grad_norm_` for sharded parameters, in the whole process.

    Torch's function of the norm alone, which gets gradients and no parameters, refuses those of sharded parameters.
    Torch's functions call an inner function inside of `no_grad`. That one is replaced, and not a name, because programs
    hold the outer one: `from torch.nn.utils import clip_grad_norm_`.
    """
    cell = inner_of(nn.utils.clip_grad_norm_)
    torchs: Callable[..., Tensor] = cell.cell_contents

    @functools.wraps(torchs)
    def routed(parameters: Any, *arguments: Any, **named: Any) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        if not isinstance(given, (list, tuple)):
            # Torch warns of a generator without parameters.
            given = list(given) or given
        is_list = isinstance(given, (list, tuple))
        how = clip_grad_norm_ if is_list and (any(map(_is_spread, given)) or _has_both(given)) else torchs
        return how(given, *arguments, **named)

    cell.cell_contents = routed
    norm = getattr(nn.utils, "get_total_norm", None)
    if norm is not None:
        _guard(inner_of(norm))


def _guard(cell: CellType) -> None:
    torchs: Callable[..., Tensor] = cell.cell_contents

    @functools.wraps(torchs)
    def guarded(tensors: Any, *arguments: Any, **named: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        parts = {id(parameter.grad) for parameter in _SPREAD.values() if parameter.grad is not None}
        if any(id(tensor) in parts for tensor in given):
            raise FlatParamError(
                "torch.nn.utils.get_total_norm: found gradients of sharded parameters, of which this rank has only a "
                "part, so the norm would be that of the part; call flatparam.clip_grad_norm_(parameters, max_norm), "
                "whose norm is that of all ranks"
            )
        return torchs(given, *arguments, **named)

    cell.cell_contents = guarded


@functools.cache
def _have_torch_scalers_agree() -> None:
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
        unit = _unit_that_spreads(parameter)
        if unit is not None:
            over = [unit.topology.shard]
            for meshes in filter(None, {handle.forms.meshes for handle in unit.handles}):
                over += meshes.groups(unit.handles)
            groups.update(dict.fromkeys(over, unit.device))
    return groups


def route_torchs_functions(unit: Unit) -> None:
    """Have torch's clipping and its loss scaler ask all ranks about the parameters of `unit`, if it has several ranks.

    Torch's `ZeroRedundancyOptimizer` refuses them. The functions are as they were for all other parameters.
    """
    if unit.topology.shard.size > 1 or any(handle.forms.meshes for handle in unit.handles):
        _have_torch_clip()
        _have_torch_scalers_agree()
        _have_joinable_optimizers_refuse()
        for handle in unit.handles:
            _SPREAD.update((id(parameter), parameter) for parameter in handle.exposure.parameters())


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
            unit = _unit_that_spreads(parameter)
            if unit is not None:
                kind = type(optimizer).__name__
                raise FlatParamError(
                    f"rank {unit.topology.rank}: {kind} was given parameters of unit {unit.name!r}, of which this rank "
                    "holds a part; it would send parts as if they were the whole. The states of every optimizer of "
                    "these parameters are sharded already: give them to the optimizer itself, such as "
                    "torch.optim.AdamW"
                )
