"""The full state of an optimizer over sharded parameters, by parameter name, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam_runtime import FlatParamError, clean_fqn
from flatparam_state.codec import fragments_of, gather, shard_of
from flatparam_state.places import Place, places_in

__all__ = ["load_optimizer_state", "optimizer_state_dict"]


@final
@attrs.frozen(eq=False)
class _Held:
    """What one parameter of an optimizer stands for: some parameters of a flat parameter, or itself (no place)."""

    place: Place | None
    fqns: tuple[str, ...]
    indices: tuple[int, ...] = ()


def optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """The state as ``{"state": {fqn: {name: value}}, "param_groups": [...]}``; every rank calls it.

    A tensor shaped like its parameter is gathered to the full shape, one flat parameter at a time; any other
    value is kept as it is. The groups list names in ``"params"``.

    Args:
        offload_to_cpu: put the gathered tensors on the CPU.
        rank0_only: only rank 0 gets it, other ranks an empty dict.
    """
    held = _held_parameters(model)
    known = _known_states(optimizer, held)
    device = torch.device("cpu") if offload_to_cpu else None
    keep = not rank0_only or _rank(model) == 0
    state: dict[str, dict[str, Any]] = {}
    for place in places_in(model):
        local = _local_states(place, known)
        for fqn, values in _gathered(place, local, device, keep):
            state.setdefault(fqn, {}).update(values)
    for item, values in known:
        if item.place is None:
            state[item.fqns[0]] = {name: _copy(value, device) for name, value in values.items()}
    if not keep:
        return {}
    ordered = [fqn for group in optimizer.param_groups for p in group["params"] for fqn in held[id(p)].fqns]
    groups = [
        {
            **{name: value for name, value in group.items() if name != "params"},
            "params": [fqn for p in group["params"] for fqn in held[id(p)].fqns],
        }
        for group in optimizer.param_groups
    ]
    return {"state": {fqn: state[fqn] for fqn in ordered if fqn in state}, "param_groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Turn what :func:`optimizer_state_dict` returned into what this rank's ``optimizer.load_state_dict`` takes.

    The world size and the units may have changed in between. No communication.

    Raises:
        FlatParamError: where a shape does not fit, naming parameter and state, or a parameter group cannot be found.
    """
    held = _held_parameters(model)
    full: Mapping[str, Mapping[str, Any]] = state_dict["state"]
    # A 0-d value is a step count, or the moment of a 0-d parameter: the same name elsewhere tells.
    shaped = {
        name
        for values in full.values()
        for name, v in values.items()
        if isinstance(v, torch.Tensor) and v.dim()
    }
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        ids = []
        for parameter in group["params"]:
            values = _sharded(held[id(parameter)], parameter, full, shaped)
            if values:
                state[number] = values
            ids.append(number)
            number += 1
        names = [fqn for p in group["params"] for fqn in held[id(p)].fqns]
        groups.append({**_saved_group(names, state_dict["param_groups"]), "params": ids})
    return {"state": state, "param_groups": groups}


def _held_parameters(model: nn.Module) -> dict[int, _Held]:
    held: dict[int, _Held] = {}
    for place in places_in(model):
        parameters = place.handle.exposure.parameters()
        if len(parameters) == 1 and parameters[0] is place.handle.flat_param:
            held[id(parameters[0])] = _Held(place, place.fqns, tuple(range(len(place.fqns))))
        else:
            for index, (parameter, fqn) in enumerate(zip(parameters, place.fqns, strict=True)):
                held[id(parameter)] = _Held(place, (fqn,), (index,))
    for name, parameter in model.named_parameters():
        held.setdefault(id(parameter), _Held(None, (clean_fqn(name),)))
    return held


def _known_states(
    optimizer: torch.optim.Optimizer, held: Mapping[int, _Held]
) -> list[tuple[_Held, dict[str, Any]]]:
    known = []
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in held:
                raise FlatParamError(
                    f"parameter {number} of the optimizer (shape {tuple(parameter.shape)}) is none of the model's; "
                    "create the optimizer from model.parameters() after sharding, or use use_orig_params=True"
                )
            if parameter in optimizer.state:
                known.append((held[id(parameter)], optimizer.state[parameter]))
    return known


@final
@attrs.define(eq=False)
class _Local:
    """One state name of one flat parameter on this rank: parts to gather, and plain values."""

    parts: dict[int, torch.Tensor] = attrs.field(factory=dict)
    plain: dict[int, Any] = attrs.field(factory=dict)


def _local_states(place: Place, known: Sequence[tuple[_Held, dict[str, Any]]]) -> dict[str, _Local]:
    """This rank's state of one flat parameter: by state name, then by the index of the parameter."""
    layout, rank = place.handle.layout, place.handle.rank
    found: dict[str, _Local] = {}
    for item, values in known:
        if item.place is None or item.place.handle is not place.handle:
            continue
        whole = (
            len(item.indices) == len(layout.slots)
            and place.handle.exposure.parameters()[0] is place.handle.flat_param
        )
        for name, value in values.items():
            local = found.setdefault(name, _Local())
            for index in item.indices:
                fragment = layout.fragment(index, rank)
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    local.parts[index] = value[fragment.in_shard.as_slice()] if whole else value
                else:
                    local.plain[index] = value
    return found


def _gathered(
    place: Place, local: Mapping[str, _Local], device: torch.device | None, keep: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    # The ranks agree on names and dtypes first: a rank may hold no element of a parameter, and so no state of it.
    group = place.unit.plan.topology.shard
    facts = [
        (name, {i: part.dtype for i, part in item.parts.items()}, item.plain)
        for name, item in sorted(local.items())
    ]
    everywhere = group.exchange(facts, label=f"optimizer state of {place.unit.name}")
    names = sorted({name for facts in everywhere for name, _, _ in facts})
    for name in names:
        entries = [(parts, plain) for facts in everywhere for other, parts, plain in facts if other == name]
        with_parts = sorted({index for parts, _ in entries for index in parts})
        plain = {index: value for _, values in reversed(entries) for index, value in values.items()}
        mine = local.get(name, _Local())
        if with_parts:
            dtype = next(dtype for parts, _ in entries for dtype in parts.values())
            slots: list[torch.Tensor | None] = [mine.parts.get(i) for i in range(len(place.fqns))]
            shard = shard_of(place, slots, place.handle.flat_param.detach()).to(dtype)
            tensors = gather(place, shard, device=device, keep=keep)
            if keep:
                yield from ((place.fqns[index], {name: tensors[index]}) for index in with_parts)
        for index, value in plain.items():
            yield place.fqns[index], {name: _copy(mine.plain.get(index, value), device)}


def _sharded(
    item: _Held, parameter: torch.Tensor, full: Mapping[str, Mapping[str, Any]], shaped: Collection[str]
) -> dict[str, Any]:
    names = dict.fromkeys(name for fqn in item.fqns for name in full.get(fqn, {}))
    values: dict[str, Any] = {}
    for name in names:
        entries = [full.get(fqn, {}).get(name) for fqn in item.fqns]
        first = next(value for value in entries if value is not None)
        if item.place is None or name not in shaped:
            values[name] = _copy(first, None)
            continue
        values[name] = _shard_entries(item, name, entries, parameter)
    return values


def _shard_entries(item: _Held, name: str, entries: Sequence[Any], parameter: torch.Tensor) -> torch.Tensor:
    assert item.place is not None, "called for sharded parameters only"
    slots = item.place.handle.layout.slots
    tensors: list[torch.Tensor | None] = [None] * len(slots)
    for fqn, index, value in zip(item.fqns, item.indices, entries, strict=True):
        if value is not None and tuple(value.shape) != slots[index].spec.shape:
            raise FlatParamError(
                f"optimizer state {name!r} of {fqn!r}: expected shape {slots[index].spec.shape}, "
                f"found {tuple(value.shape)}"
            )
        tensors[index] = value
    parts = list(fragments_of(item.place, tensors))
    if parameter is item.place.handle.flat_param:
        return shard_of(item.place, parts, parameter)
    part = parts[item.indices[0]]
    assert part is not None, "a state that was found has a tensor"
    return part.to(parameter.device, copy=True)


def _saved_group(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for group in groups:
        if not names or names[0] in group["params"]:
            return {key: value for key, value in group.items() if key != "params"}
    raise FlatParamError(f"no parameter group of the saved optimizer state holds {names[0]!r}")


def _copy(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return value


def _rank(model: nn.Module) -> int:
    for place in places_in(model):
        return place.unit.plan.topology.shard.rank
    return 0
