"""Full parameters outside of forward and backward: to look at, to change, to save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flatparam_comm import FlatParamError, FlatParamHandle
from flatparam_runtime.phases import Phase
from flatparam_runtime.tree import tree_of, unit_of, units_in
from flatparam_runtime.unit import Unit

__all__ = ["full_views", "gather_full", "inspecting", "shown", "summon_full_params"]


def gather_full(unit: Unit, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
    """Gather something shaped like the handle's shard (weights, or an optimizer's moment of them) from every rank.

    Args:
        shard: 1-D, `layout.shard_numel` elements, any dtype, on the device of the group of ranks.

    Returns:
        1-D, `layout.numel` elements, new, in the dtype of `shard`; every rank of the group must call it.
    """
    full = shard.new_empty(handle.layout.numel)
    unit.plan.topology.shard.all_gather(full, shard, label=unit.name).wait()
    return full


def full_views(handle: FlatParamHandle, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parameters in `full` (1-D, `layout.numel` elements), each in its shape, as views."""
    return tuple(
        full.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start) for slot in handle.layout.slots
    )


@contextlib.contextmanager
def inspecting(unit: Unit) -> Iterator[None]:
    """Keep `unit` from running, sharded and out of every pass, while its parameters are looked at or replaced.

    Raises:
        FlatParamError: inside a forward or backward pass, or where it is being inspected already.
    """
    if unit.phase is Phase.INSPECTING:
        raise FlatParamError(
            f"unit {unit.name!r}: its full parameters are summoned, or its state is saved, already; these "
            "contexts do not nest"
        )
    if tree_of(unit).is_in_a_pass:
        raise FlatParamError(
            f"unit {unit.name!r}: full parameters cannot be summoned, and state neither saved nor loaded, "
            "inside a forward or backward pass"
        )
    unit.move(Phase.INSPECTING)
    try:
        unit.reshard()
        yield
    finally:
        unit.move(Phase.IDLE)


@contextlib.contextmanager
def shown(unit: Unit, values: Sequence[Sequence[nn.Parameter | None]]) -> Iterator[None]:
    """Show `values` (for each handle, one per parameter) under the parameters' names while `unit` is inspected."""
    try:
        unit.show(values)
        yield
    finally:
        unit.show_shard()


@contextlib.contextmanager
def summon_full_params(module: nn.Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Show the full parameters of every unit of `module`, as ordinary registered parameters in their own dtype.

    Every rank enters and leaves it. All units are gathered at once: memory for the whole module.

    Args:
        recurse: also the units below `module`, not only its own.
        writeback: take over what was changed inside; each rank keeps its own part of its own changes.

    Raises:
        FlatParamError: inside a forward or backward pass, or nested.
    """
    own = unit_of(module)
    units = units_in(module) if recurse else (() if own is None else (own,))
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summoned(unit, writeback))
        yield


@contextlib.contextmanager
def _summoned(unit: Unit, writeback: bool) -> Iterator[None]:
    with inspecting(unit):
        gathered = [gather_full(unit, handle, handle.flat_param.detach()) for handle in unit.handles]
        with shown(
            unit, [_parameters(handle, full) for handle, full in zip(unit.handles, gathered, strict=True)]
        ):
            yield
        if writeback:
            for handle, full in zip(unit.handles, gathered, strict=True):
                own = full[handle.layout.shard_span(handle.rank).as_slice()]
                if not torch.equal(
                    own, handle.flat_param.detach()
                ):  # what has not changed counts as unchanged
                    handle.flat_param.detach().copy_(own)


def _parameters(handle: FlatParamHandle, full: torch.Tensor) -> list[nn.Parameter | None]:
    wanted = handle.exposure.requires_grad()
    views = full_views(handle, full)
    return [nn.Parameter(view, requires_grad=needs) for view, needs in zip(views, wanted, strict=True)]
