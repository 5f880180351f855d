"""From a module to the handles of its flat parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatparam_core.bindings import BoundParameter, discover
from flatparam_core.errors import FlatParamError
from flatparam_core.handle import FlatParamHandle
from flatparam_core.layout import plan_layouts
from flatparam_core.precision import Precision

__all__ = ["FLAT_PARAM", "ORIGINAL_ALIGNMENT_NBYTES", "flatten_module"]

FLAT_PARAM = "_flat_param"
"""The name under which a module registers its flat parameter; a second one gets `_1` behind it, and so on."""

ORIGINAL_ALIGNMENT_NBYTES = 16
"""Where the original parameters stay visible, each begins at a multiple of this in the flat parameter, as in FSDP1."""


def flatten_module(
    module: nn.Module,
    *,
    rank: int,
    world_size: int,
    use_orig_params: bool = False,
    precision: Precision | None = None,
    device: torch.device | None = None,
    parameters: Sequence[BoundParameter] | None = None,
) -> tuple[FlatParamHandle, ...]:
    """Shard the parameters of `module` in place; every rank calls it with equal modules.

    Args:
        module: afterwards shows its sharded form until a handle is unsharded.
        rank: this rank's place among the `world_size` ranks that share the parameters.
        use_orig_params: whether `module.parameters()` lists the original objects, or flat parameters.
        precision: compute and reduction dtypes; by default every parameter's own.
        device: where the shards and full parameters live; by default where the parameters are.
        parameters: what to flatten, by default all that `discover` finds.

    Returns:
        One handle per dtype and per trainable or frozen, trainable ones first; empty where there is no parameter.

    Raises:
        FlatParamError: where a parameter belongs to another flat parameter already, or to several devices.
    """
    bound = discover(module) if parameters is None else tuple(parameters)
    if not bound:
        return ()
    _check_unclaimed(bound)
    home = device or _common_device(bound)
    by_name = {b.names[0]: b for b in bound}
    layouts = plan_layouts(
        [b.spec for b in bound],
        world_size=world_size,
        alignment_nbytes=ORIGINAL_ALIGNMENT_NBYTES if use_orig_params else 0,
    )
    return tuple(
        FlatParamHandle.create(
            module,
            [by_name[fqn] for fqn in layout.fqns],
            layout,
            rank=rank,
            attribute=None if use_orig_params else _free_attribute(module),
            precision=precision or Precision(),
            device=home,
        )
        for layout in layouts
    )


def _free_attribute(owner: nn.Module) -> str:
    taken = sum(name.startswith(FLAT_PARAM) for name in owner._parameters)
    return f"{FLAT_PARAM}_{taken}" if taken else FLAT_PARAM


def _check_unclaimed(bound: Sequence[BoundParameter]) -> None:
    for b in bound:
        if getattr(b.parameter, "_fsdp_flattened", False):
            raise FlatParamError(
                f"parameter {b.names[0]!r} already belongs to another unit (names are below the module that is "
                "sharded now); make one unit of a module that contains everything that shares the parameter"
            )


def _common_device(bound: Sequence[BoundParameter]) -> torch.device:
    first = bound[0]
    for b in bound:
        if b.parameter.device != first.parameter.device:
            raise FlatParamError(
                f"parameter {b.names[0]!r} is on {b.parameter.device}, {first.names[0]!r} on "
                f"{first.parameter.device}; move the module to one device, or say which with device="
            )
    return first.parameter.device
