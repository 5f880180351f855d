"""A state that only the first rank has: described to all ranks, and sent tensor by tensor when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from flatparam_state.forms import Streamed, as_tensor, from_first, is_tensor_like, shape_of
from flatparam_state.optimizer.saved_states import concrete
from flatparam_state.places import places_in

__all__ = ["arrived", "streamed"]


def arrived(value: Any) -> Any:
    """Return a value that is no parameter's state, on every rank."""
    if isinstance(value, Mapping):
        return {key: arrived(each) for key, each in value.items()}
    return value.arrive() if isinstance(value, Streamed) else value


def streamed(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first rank's state, on every rank, with stand-ins for its tensors."""
    place = next(iter(places_in(model)), None)
    if place is None:
        return state_dict
    topology, device = place.unit.topology, place.handle.device

    def mapped(state: Any, tensor: Callable[[str, str, Any], Any]) -> Any:
        if not isinstance(state, Mapping) or "state" not in state:
            return state
        entries = {
            fqn: {name: tensor(fqn, name, value) for name, value in values.items()}
            if isinstance(values, Mapping)
            else values
            for fqn, values in state["state"].items()
        }
        return {**state, "state": entries}

    def described(fqn: str, name: str, value: Any) -> Any:
        if is_tensor_like(value) and shape_of(value):
            return Streamed(shape_of(value), as_tensor(value).dtype)
        return concrete(value)

    def arriving(fqn: str, name: str, value: Any) -> Any:
        if not isinstance(value, Streamed):
            return value
        here = state_dict["state"][fqn][name] if topology.is_first else None
        return attrs.evolve(value, topology=topology, device=device, tensor=here)

    skeleton = mapped(state_dict, described) if topology.is_first else None
    return mapped(from_first(topology, skeleton, label="optimizer state"), arriving)  # type: ignore[no-any-return]
