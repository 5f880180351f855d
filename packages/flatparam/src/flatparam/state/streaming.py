"""A state that only the first rank has: its tensors are sent to the others, one after the other, or its names only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch
from torch import nn

from flatparam_comm import Topology
from flatparam_state import Streamed, as_tensor, from_first, is_tensor_like, places_in, shape_of

__all__ = ["streamed", "with_names_of_first"]


def streamed(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state for every rank to load, if only the first rank has one and the others pass an empty one; else `state`.

    The parameters of units are sent when they are loaded, one after the other; everything else is sent here.
    Every rank calls it.
    """
    places = list(places_in(model))
    if not places or not _is_only_on_first(places[0].unit.topology, bool(state)):
        return state
    topology, device = places[0].unit.topology, places[0].handle.device
    sharded = {name for place in places for names in place.names for name in names}
    skeleton = from_first(
        topology,
        {
            key: Streamed(shape_of(value), as_tensor(value).dtype) if is_tensor_like(value) else value
            for key, value in state.items()
        },
        label="state dict",
    )
    whole: Any = OrderedDict()
    for key, value in skeleton.items():
        if isinstance(value, Streamed):
            value = attrs.evolve(value, topology=topology, device=device, tensor=state.get(key))
            whole[key] = value if key in sharded else value.arrive()
        else:
            whole[key] = value
    whole._metadata = from_first(topology, getattr(state, "_metadata", None), label="state dict")
    return cast("Mapping[str, Any]", whole)


def with_names_of_first(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, if only the first rank has one, with its names on every rank; else `state`. Every rank calls it.

    In the places of the first rank's tensors the others have tensors on the meta device.
    """
    places = list(places_in(model))
    if not places or not _is_only_on_first(places[0].unit.topology, bool(state)):
        return state
    named: Any = OrderedDict(
        (key, torch.empty(shape_of(value), dtype=as_tensor(value).dtype, device="meta"))
        if is_tensor_like(value)
        else (key, value)
        for key, value in state.items()
    )
    named = from_first(places[0].unit.topology, named, label="names of the state")
    return state or cast("Mapping[str, Any]", named)


def _is_only_on_first(topology: Topology, is_here: bool) -> bool:
    first, *others = topology.exchange(is_here, label="who has the state")
    return first and bool(others) and not any(others)
