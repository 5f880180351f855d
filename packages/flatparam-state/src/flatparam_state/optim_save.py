"""The full state of an optimizer over sharded parameters, by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam_runtime import FlatParamError
from flatparam_state.codec import gather, shard_of
from flatparam_state.held import Held, held_by, held_parameters
from flatparam_state.places import Place, places_in

__all__ = ["optimizer_state_dict"]


def optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """The state as `{"state": {fqn: {name: value}}, "param_groups": [...]}`; every rank calls it.

    A tensor that is shaped like its parameter's sharded form is gathered to the full shape, one flat parameter at a
    time; any other value is kept as it is. The groups list names in `"params"`.

    Args:
        offload_to_cpu: put tensors on the CPU.
        rank0_only: only rank 0 gets the state, other ranks an empty dict.

    Raises:
        FlatParamError: where the optimizer holds a parameter that is not the model's, or a state is shaped like its
            parameter's shard on some ranks only.
    """
    groups = list(held_by(optimizer, held_parameters(model)))
    device = torch.device("cpu") if offload_to_cpu else None
    keep = not rank0_only or _rank(model) == 0
    items = [item for _, found in groups for item in found]
    state: dict[str, dict[str, Any]] = {}
    for place in places_in(model):
        local = _local(place, items, optimizer)
        for fqn, name, value in _gathered(place, local, device, keep):
            state.setdefault(fqn, {})[name] = value
    for item in items:
        if item.place is None and item.parameter in optimizer.state:
            values = optimizer.state[item.parameter]
            state[item.fqns[0]] = {name: copy_value(value, device) for name, value in values.items()}
    if not keep:
        return {}
    names = [fqn for item in items for fqn in item.fqns]
    return {
        "state": {fqn: state[fqn] for fqn in names if fqn in state},
        "param_groups": [
            {**group, **_names(group, [fqn for item in found for fqn in item.fqns])}
            for group, found in groups
        ],
    }


def _names(group: Mapping[str, object], fqns: list[str]) -> dict[str, list[str]]:
    """The group's names, also where the optimizer was made from named parameters."""
    return {key: list(fqns) for key in ("params", "param_names") if key in group}


def copy_value(value: Any, device: torch.device | None) -> Any:
    """`value` with memory of its own, on `device` where one is given."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return value


@final
@attrs.define(eq=False)
class _Local:
    """One state name of one flat parameter on this rank, by parameter index: parts to gather, and plain values."""

    parts: dict[int, torch.Tensor] = attrs.field(factory=dict)
    plain: dict[int, Any] = attrs.field(factory=dict)


def _local(place: Place, items: list[Held], optimizer: torch.optim.Optimizer) -> dict[str, _Local]:
    layout, rank = place.handle.layout, place.handle.rank
    found: dict[str, _Local] = {}
    for item in items:
        if (
            item.place is None
            or item.place.handle is not place.handle
            or item.parameter not in optimizer.state
        ):
            continue
        for name, value in optimizer.state[item.parameter].items():
            local = found.setdefault(name, _Local())
            for index in item.indices:
                if not (isinstance(value, torch.Tensor) and value.shape == item.parameter.shape):
                    local.plain[index] = value
                elif item.is_flat:
                    local.parts[index] = value[layout.fragment(index, rank).in_shard.as_slice()]
                else:
                    local.parts[index] = value.reshape(-1)
    return found


def _gathered(
    place: Place, local: Mapping[str, _Local], device: torch.device | None, keep: bool
) -> Iterator[tuple[str, str, Any]]:
    # The ranks agree on names and dtypes first: a rank may hold no element of a parameter, and so no state of it.
    group = place.unit.plan.topology.shard
    facts = {name: ({i: p.dtype for i, p in item.parts.items()}, item.plain) for name, item in local.items()}
    everywhere = group.exchange(facts, label=f"optimizer state of {place.unit.name}")
    for name in dict.fromkeys(name for facts in everywhere for name in facts):
        entries = [facts[name] for facts in everywhere if name in facts]
        dtypes = {index: dtype for parts, _ in entries for index, dtype in parts.items()}
        plain = {index: value for _, values in reversed(entries) for index, value in values.items()}
        mine = local.get(name, _Local())
        for index in sorted(dtypes.keys() & plain.keys()):
            raise FlatParamError(
                f"optimizer state {name!r} of {place.fqns[index]!r} has the shape of the parameter's "
                "shard on some ranks "
                "only, so it is unclear what it is; only states shaped like the parameter, or like none "
                "of its shards, can "
                "be saved in full"
            )
        if dtypes:
            parts = [mine.parts.get(index) for index in range(len(place.fqns))]
            shard = shard_of(place, parts, place.handle.flat_param.detach()).to(next(iter(dtypes.values())))
            full = gather(place, shard, device=device, keep=keep)
            if keep:
                yield from ((place.fqns[index], name, full[index]) for index in sorted(dtypes))
        for index, value in plain.items():
            yield place.fqns[index], name, copy_value(mine.plain.get(index, value), device)


def _rank(model: nn.Module) -> int:
    for place in places_in(model):
        return place.unit.plan.topology.group.rank
    return 0
