"""A unit at rest that shows something other than its sharded form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flatparam_comm import FlatParamError, FlatParamHandle, gather_shards, telling
from flatparam_runtime.passes import tree_of
from flatparam_runtime.unit import Phase, Unit


def gather_full(unit: Unit, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
    """Gather a tensor with the shape of the handle's shard (weights, or an optimizer's moment of them) from every rank.

    Args:
        shard: 1-D, as long as the handle's shard, any dtype, on any device.

    Returns:
        A new tensor: 1-D, `layout.numel` elements, in the dtype of `shard`, on the device of the full parameters.
        Every rank of the group must call the function.
    """
    shard = shard.to(handle.device)
    full = shard.new_empty(handle.layout.numel)
    gather_shards(unit.topology.shard, handle.layout, full, shard, label=unit.name).wait()
    return full


def full_views(handle: FlatParamHandle, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parameters in `full` (1-D, `layout.numel` elements), each in its shape, as views."""
    return tuple(full.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start) for slot in handle.layout.slots)


@contextlib.contextmanager
def inspecting(unit: Unit) -> Iterator[None]:
    """Keep `unit` sharded and out of every pass while its parameters are inspected or replaced.

    Raises:
        FlatParamError: inside a forward or backward pass, or if the unit is being inspected already.
    """
    if unit.phase is Phase.INSPECTING:
        raise FlatParamError(
            f"unit {unit.name!r}: its full parameters are summoned, or its state is saved, already; these "
            "contexts do not nest"
        )
    refuse_in_a_pass(unit)
    unit.showing.check_here(unit.name, unit.topology.rank)
    unit.move(Phase.INSPECTING)
    try:
        with telling(f"state_dict(), summon_full_params() or loading, at unit {unit.name!r}"):
            unit.take_over(frees=True)
            yield
    finally:
        unit.move(Phase.IDLE)


class InAPassError(FlatParamError, AssertionError):
    """A call inside a forward or backward pass that is legal only outside of passes; FSDP1 raises AssertionError."""


def refuse_in_a_pass(unit: Unit) -> None:
    """Check that no pass is running in the tree of `unit`.

    Raises:
        InAPassError: if a pass is running.
    """
    tree = tree_of(unit)
    tree.drop_remains()
    if tree.is_in_a_pass:
        raise InAPassError(
            f"unit {unit.name!r}: inside a forward or backward pass full parameters cannot be summoned, state cannot "
            "be saved or loaded, and the model cannot be moved or cast"
        )


@contextlib.contextmanager
def shown(unit: Unit, values: Sequence[Sequence[nn.Parameter | None]]) -> Iterator[None]:
    """Show `values` (for each handle, one per parameter) under the parameters' names while `unit` is inspected."""
    try:
        _show(unit, values)
        yield
    finally:
        if unit.showing.pins:
            _show(unit, [handle.leaves for handle in unit.handles])
        else:
            for handle in unit.handles:
                handle.exposure.show_shard()
                handle.exposure.list_flat_parameter(True)


def _show(unit: Unit, values: Sequence[Sequence[nn.Parameter | None]]) -> None:
    for handle, parameters in zip(unit.handles, values, strict=True):
        handle.exposure.show(parameters)
        handle.exposure.list_flat_parameter(False)
