"""Experts: units over some of the model's ranks, of which the others hold different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from flatparam_comm import Collectives, FlatParamError, FlatParamHandle, Topology, process_group_of
from flatparam_meshes.unit_meshes import UnitMeshes
from flatparam_runtime import Unit, units_in

_LABEL: Final = "experts"


def hold_experts(model: nn.Module, *, dim: int | None = None) -> int:
    """Have the units of `model` that are over some of its ranks hold experts: the other ranks hold different ones.

    Such a unit was sharded over a smaller group or mesh than the model (`process_group`, `device_mesh`, `mesh`). Its
    ranks compute with tokens of all ranks, which the model sends to them. So:

    * The sum of its gradients is divided by the number of all data-parallel ranks of the model, as that of the
      others. By default, as in FSDP1 and FSDP2, it is divided by the number of the unit's own ranks.
    * `clip_grad_norm_`, loss scalers and `nonfinite` count the experts of all ranks.

    Every rank calls it once, after the model is sharded and before it is trained. A divisor of the user's
    (`set_gradient_divide_factor`) stays.

    Args:
        dim: 0 says that plain parameters of the same name on these ranks are the parts of one tensor along dimension
            0, in the order of the ranks, as the weights of stacked experts are. A directory has that tensor then, and
            loads it on any number of ranks. Without it plain experts are not saved. Experts that are `DTensor`s say it
            themselves.

    Returns:
        The number of units that hold experts.

    Raises:
        FlatParamError: if `model` is not sharded, or the ranks of such units do not cut those of the model into groups
            of one size; on every rank, naming the unit. With `dim`, if a plain parameter has no dimension 0, or is of a
            different shape on ranks that hold other experts.
        ValueError: for a `dim` other than 0.
    """
    if dim not in (None, 0):
        raise ValueError(f"hold_experts: expected dim=0, along which experts are stacked, or None, found {dim!r}")
    units = units_in(model)
    if not units:
        raise FlatParamError(
            f"hold_experts: this {type(model).__name__} is not sharded; call it with the outermost module that is"
        )
    ranks, size = units[0].topology, units[0].topology.data_parallel_size
    around = _members(ranks)
    across: dict[tuple[tuple[int, ...], ...], Collectives] = {}
    held = 0
    for unit in units:
        if unit.topology.data_parallel_size == size:
            continue
        held += 1
        groups = _groups_of_ranks(unit, ranks)
        if groups not in across:
            across[groups] = _across(groups, ranks)
        if unit.reducer.divide_factor is None:
            unit.reducer.divide_factor = float(size)
        for handle in unit.handles:
            meshes = handle.forms.meshes or UnitMeshes(sums_late=False)
            meshes.experts, meshes.around = across[groups], around
            meshes.is_stacked = dim is not None
            handle.forms.meshes = meshes
            if dim is not None:
                _check_stackable(handle, meshes, across[groups])
    return held


def _check_stackable(handle: FlatParamHandle, meshes: UnitMeshes, across: Collectives) -> None:
    """Check that the plain parameters of `handle` can be stacked over the ranks `across`; each of these calls it."""
    plain = [
        (slot.spec.fqn, slot.spec.shape, slot.spec.stride)
        for index, slot in enumerate(handle.layout.slots)
        if meshes.form(handle, index) is None
    ]
    told = across.exchange(plain, label=_LABEL)
    for name, shape, stride in plain:
        if not shape or stride[0] < max(stride):
            raise FlatParamError(
                f"hold_experts: parameter {name!r} of shape {shape} and strides {stride}: expected one whose dimension "
                "0 is the outermost in memory, so that experts can be stacked along it; make it contiguous()"
            )
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise FlatParamError(
                f"hold_experts: expected the same plain parameters on the ranks that hold other experts, found "
                f"{told[0]} on the first of them and {theirs} on number {rank}; make as many experts on each rank, or "
                "make the parameters DTensors with Shard(0) over these ranks"
            )


def _groups_of_ranks(unit: Unit, ranks: Topology) -> tuple[tuple[int, ...], ...]:
    """Return, for each set of experts, the numbers of the model's ranks that share it; every rank calls it.

    Raises:
        FlatParamError: if not every rank is in one of these, or they have different sizes.
    """
    mine = tuple(unit.topology.exchange(ranks.rank, label=_LABEL))
    told = ranks.exchange(mine, label=_LABEL)
    found = tuple(dict.fromkeys(told))
    if sorted(rank for group in found for rank in group) != list(range(len(told))) or len({*map(len, found)}) > 1:
        raise FlatParamError(
            f"hold_experts: unit {unit.name!r}: expected groups of one size that have each of the model's {len(told)} "
            f"data-parallel ranks once, found {list(found)}; shard the experts over a dimension of a mesh of which the "
            "model's ranks are two dimensions"
        )
    return found


def _across(groups: Sequence[Sequence[int]], ranks: Topology) -> Collectives:
    """Return ranks of which each set of experts has one, this rank among them; every rank of the model calls it.

    They share the model's shards, or hold copies of these: so every such group of ranks makes its own, whatever other
    ranks there are.
    """
    for base in ranks.groups:
        numbers = Topology(base).exchange(ranks.rank, label=_LABEL)
        places = [[place for place, number in enumerate(numbers) if number in group] for group in groups]
        if places[0] and len({*map(len, places)}) == 1:
            made = [base.subgroup(list(row)) for row in zip(*places, strict=True)]
            return next(group for group in made if group is not None)
    raise FlatParamError(
        f"hold_experts: expected sets of experts, {list(groups)}, that have equally many of the ranks of each shard "
        "group of the model, or of each replicate group, found other ones; lay experts over a dimension of a mesh of "
        "which the model's shards, or copies, are dimensions"
    )


def _members(ranks: Topology) -> frozenset[int]:
    """Return the global numbers of the model's data-parallel ranks; none in a world of threads."""
    own = process_group_of(ranks.group)
    if own is None:
        return frozenset()
    return frozenset(ranks.exchange(torch.distributed.get_rank(), label=_LABEL))
