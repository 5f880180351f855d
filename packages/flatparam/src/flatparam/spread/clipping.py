"""Clipping gradients that are spread over ranks, by the parameters that have them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from flatparam.compat.clipping import route_torchs_clipping
from flatparam.spread.parameters import unit_that_spreads
from flatparam_core import FlatParamError
from flatparam_runtime import Collectives, clip_gradients_

__all__ = ["clip_grad_norm_", "have_torch_clip"]


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
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sharded: dict[Collectives, list[Tensor]] = {}
    whole: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    device: torch.device | None = None
    seen: set[int] = set()
    for parameter in given:
        gradient, unit = parameter.grad, unit_that_spreads(parameter)
        into = whole if unit is None else sharded.setdefault(unit.topology.shard, [])
        if unit is not None and device is None:
            device = unit.device
        if gradient is not None and id(gradient) not in seen:
            seen.add(id(gradient))
            into.append(gradient)
        # A rank may have no gradient where other ranks have one.
        if gradient is not None or (unit is not None and parameter.requires_grad):
            # The norm of complex numbers is a real one.
            dtypes.append((parameter.dtype if gradient is None else gradient.dtype).to_real())
    if device is None:
        device = next((parameter.device for parameter in given), torch.device("cpu"))
    units = [unit for each in given if (unit := unit_that_spreads(each)) is not None]
    total = clip_gradients_(
        sharded,
        whole,
        float(max_norm),
        float(norm_type),
        device=device,
        error_if_nonfinite=error_if_nonfinite,
        foreach=foreach,
        units=units,
    )
    return total.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else total


def _is_spread(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and unit_that_spreads(parameter) is not None


def _refuse_norm(name: str) -> None:
    raise FlatParamError(
        f"torch.nn.utils.{name}: found gradients of sharded parameters, of which this rank has only a part, so the "
        "norm would be that of the part; call flatparam.clip_grad_norm_(parameters, max_norm), whose norm is that of "
        "all ranks"
    )


def have_torch_clip() -> None:
    """Have `torch.nn.utils.clip_grad_norm_` call `clip_grad_norm_` for sharded parameters, in the whole process.

    Torch's function of the norm alone, which gets gradients and no parameters, refuses those of sharded parameters.
    """
    route_torchs_clipping(_is_spread, clip_grad_norm_, _refuse_norm)
