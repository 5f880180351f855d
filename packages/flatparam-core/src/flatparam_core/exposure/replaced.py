"""Parameters that somebody has registered in the place of those that were put there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import ParamInfo
from flatparam_core.exposure.owners import marked_owner
from flatparam_core.flat_parameter import FlatParameter

__all__ = ["fitting_replacements", "is_harmless", "refuse_sharded", "replaced"]


def is_harmless(found: torch.Tensor | None, shown: torch.Tensor | None) -> bool:
    """Return whether `found` may replace `shown`: it is the same, or both are frozen and have the same memory.

    Layers of bitsandbytes give themselves such a parameter during a forward pass.
    """
    if found is shown:
        return True
    if found is None or shown is None or found.requires_grad or shown.requires_grad:
        return False
    facts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (found, shown)]
    return facts[0] == facts[1]


def replaced(info: ParamInfo) -> FlatParamError:
    """Return the error for a parameter that is not the one that was put there."""
    return FlatParamError(
        f"parameter {info.fqn!r} was replaced by another object after its module was sharded, so the other ranks would "
        "train without it; change its values instead, inside summon_full_params(), or replace it before sharding"
    )


def refuse_sharded(found: nn.Parameter, info: ParamInfo, flat_param: FlatParameter, index: int) -> None:
    """Raise FlatParamError if what was put in the place of parameter `index` is another parameter that is sharded."""
    owner: Any = marked_owner(found)
    if owner is not None and (owner[0].flat_param is not flat_param or owner[1] != index):
        raise FlatParamError(
            f"parameter {info.fqn!r} was tied to {owner[0].layout.fqns[owner[1]]!r} after its module was sharded, so "
            "both would be trained; tie parameters before sharding, or copy the values inside summon_full_params()"
        )


def fitting_replacements(
    infos: Sequence[Sequence[ParamInfo]], shown: Sequence[torch.Tensor | None]
) -> dict[int, nn.Parameter]:
    """By index, the parameters that somebody has registered instead of `shown`, under all names of each.

    Only what has the same shape and dtype, and is on the same device, is among them.

    Args:
        infos: for each parameter, its attributes.
        shown: for each parameter, the tensor that was registered there.
    """
    found: dict[int, nn.Parameter] = {}
    for index, (places, old) in enumerate(zip(infos, shown, strict=True)):
        modules = [info.reference() for info in places]
        there = [
            None if module is None else module._parameters.get(info.param_name)
            for module, info in zip(modules, places, strict=True)
        ]
        new = there[0]
        if new is None or old is None or new is old or any(each is not new for each in there):
            continue
        if (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
            found[index] = new
    return found
