"""Optimizer state with one level of keys, as in `state.layer1.weight.exp_avg` and `param_groups.layer1.weight.lr`.

The format is that of torch's `flatten_optimizer_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from flatparam_core import FlatParamError
from flatparam_state import Holding

__all__ = ["flattened", "unflattened"]


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state by parameter name, flattened; each parameter has a copy of its group's settings."""
    flat = dict(_leaves("state", state["state"]))
    for group in state["param_groups"]:
        for fqn in group["params"]:
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    flat[f"param_groups.{fqn}.{name}"] = value
    return flat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, each in value.items():
        yield from _leaves(f"{path}.{key}", each)


def unflattened(
    model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of what `optimizer` holds, from a flattened one.

    Raises:
        FlatParamError: if the parameters of one group have different settings.
    """
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for _, items in Holding.of(model, optimizer).groups:
        settings: dict[str, Any] = {}
        names = []
        for fqn in (fqn for item in items for fqn in item.fqns):
            values = _below(flat, f"state.{fqn}.")
            if values:
                state["state"][fqn] = values
            own = _below(flat, f"param_groups.{fqn}.")
            if own:
                names.append(fqn)
            for name, value in own.items():
                if settings.setdefault(name, value) != value:
                    raise FlatParamError(
                        f"the optimizer state has {name}={value!r} for {fqn!r} and {settings[name]!r} for "
                        f"{names[0]!r}, which are in one parameter group now; give the optimizer the groups that it had"
                    )
        state["param_groups"].append({**settings, "params": names})
    return state


def _below(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith(prefix):
            *path, name = key[len(prefix) :].split(".")
            target = nested
            for part in path:
                target = target.setdefault(part, {})
            target[name] = value
    return nested
