"""A full optimizer state, back into the optimizer of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flatparam_runtime import FlatParamError
from flatparam_state.codec import fragments_of, shard_of
from flatparam_state.held import Held, held_by, held_parameters
from flatparam_state.optim_save import copy_value

__all__ = ["load_optimizer_state"]

State = Mapping[str, Mapping[str, Any]]

_NAMES = frozenset({"params", "param_names"})
"""The entries of a group that name its parameters; the others are settings."""

_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""The 0-d states of torch's optimizers that are not shaped like the parameter."""


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Turn what `optimizer_state_dict` returned into what this rank's `optimizer.load_state_dict` takes.

    The world size and the units may have changed in between. No communication: every rank passes the full state.

    Raises:
        FlatParamError: where something does not fit, naming the parameter, the state and what to do. Nothing is
            changed then.
    """
    full, saved_groups = _checked(state_dict)
    shaped = _shaped_names(model, full)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, found in held_by(optimizer, held_parameters(model)):
        numbers = list(range(number, number + len(found)))
        number += len(found)
        for index, item in zip(numbers, found, strict=True):
            values = {name: _value(item, name, full, name in shaped) for name in _state_names(item, full)}
            if values:
                state[index] = values
        names = [fqn for item in found for fqn in item.fqns]
        settings = _settings(names, saved_groups) if names else {}
        groups.append({**group, **settings, "params": numbers})
    return {"state": state, "param_groups": groups}


def _checked(state_dict: Any) -> tuple[State, Sequence[Mapping[str, Any]]]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = (
            f"the keys {sorted(map(str, state_dict))}"
            if isinstance(state_dict, Mapping)
            else repr(state_dict)
        )
        raise FlatParamError(
            f"expected a full optimizer state with 'state' and 'param_groups', found {found}; every rank "
            "needs the full state: "
            "if it was saved with rank0_only, load or broadcast it on every rank first"
        )
    names = [
        *state_dict["state"],
        *(name for group in state_dict["param_groups"] for name in group["params"]),
    ]
    for name in names:
        if not isinstance(name, str):
            raise FlatParamError(
                f"expected an optimizer state by parameter names, found the key {name!r}; it looks like "
                "the state_dict() of an "
                "ordinary optimizer, which numbers parameters: rename its keys and the groups' params first"
            )
    return state_dict["state"], state_dict["param_groups"]


def _state_names(item: Held, full: State) -> list[str]:
    return list(dict.fromkeys(name for fqn in item.fqns for name in full.get(fqn, {})))


def _shaped_names(model: nn.Module, full: State) -> set[str]:
    """The states that are shaped like their parameter.

    A 0-d state of a 0-d parameter does not say which it is; what the name is elsewhere does.
    """
    shapes = {
        fqn: item.place.handle.layout.slots[index].spec.shape
        for item in held_parameters(model).values()
        if item.place is not None
        for fqn, index in zip(item.fqns, item.indices, strict=True)
    }
    shaped: set[str] = set()
    counters: set[str] = set(_COUNTERS)
    for fqn, values in full.items():
        for name, value in values.items():
            if shapes.get(fqn) and isinstance(value, torch.Tensor):
                if tuple(value.shape) == shapes[fqn]:
                    shaped.add(name)
                elif value.dim() == 0:
                    counters.add(name)
    for fqn, values in full.items():
        if shapes.get(fqn) == ():
            shaped.update(
                name for name, v in values.items() if isinstance(v, torch.Tensor) and name not in counters
            )
    return shaped


def _value(item: Held, name: str, full: State, is_shaped: bool) -> Any:
    entries = {fqn: full[fqn][name] for fqn in item.fqns if name in full.get(fqn, {})}
    if item.place is not None and is_shaped and any(value is not None for value in entries.values()):
        return _sharded(item, name, entries)
    first_fqn, first = next(iter(entries.items()))
    for fqn, value in entries.items():
        if not _equal(value, first):
            raise FlatParamError(
                f"optimizer state {name!r} is {first!r} for {first_fqn!r} and {value!r} for {fqn!r}, "
                "which lie in one flat "
                "parameter and can have only one; shard with use_orig_params=True, or make them units of their own"
            )
    return copy_value(first, None)


def _sharded(item: Held, name: str, entries: Mapping[str, Any]) -> torch.Tensor:
    assert item.place is not None, "called for sharded parameters only"
    slots = item.place.handle.layout.slots
    tensors: list[torch.Tensor | None] = [None] * len(slots)
    for fqn, index in zip(item.fqns, item.indices, strict=True):
        value = entries.get(fqn)
        if value is None:
            continue
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != slots[index].spec.shape:
            raise FlatParamError(
                f"optimizer state {name!r} of {fqn!r}: expected a tensor of shape "
                f"{slots[index].spec.shape}, found {found}; "
                "the state was saved from another model"
            )
        tensors[index] = value
    parts = list(fragments_of(item.place, tensors))
    if item.is_flat:
        return shard_of(item.place, parts, item.parameter)
    part = parts[item.indices[0]]
    assert part is not None, "an original's state has one entry, which is a tensor"
    return part.to(item.parameter.device, copy=True).view(item.parameter.shape)


def _settings(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that the saved groups give to the parameters `names`, which must be the same for all."""
    home = {name: group for group in groups for name in group["params"]}
    for name in names:
        if name not in home:
            raise FlatParamError(
                f"no parameter group of the saved optimizer state holds {name!r}; it was saved from "
                "another model, or the "
                "optimizer then did not hold this parameter"
            )
    first = {key: value for key, value in home[names[0]].items() if key not in _NAMES}
    for name in names[1:]:
        other = home[name]
        for key in sorted(first.keys() | (other.keys() - _NAMES)):  # every rank names the same
            if not _equal(first.get(key), other.get(key)):
                raise FlatParamError(
                    f"the saved optimizer state has {key}={first.get(key)!r} for {names[0]!r} and "
                    f"{other.get(key)!r} for "
                    f"{name!r}, which are in one parameter group now; give the optimizer the groups that it had, with "
                    "use_orig_params=True where a flat parameter joins them"
                )
    return first


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)
