"""What torch.distributed.checkpoint plans to load: optimizer states before a first step, tensors without a part."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from flatparam.compat.patching import Patch
from flatparam_state import FirstState, is_sharded_tensor

__all__ = ["patch_of_planner"]


def patch_of_planner() -> Patch:
    """The patch by which torch's planner takes a parameter that a checkpoint has no state of for one never stepped.

    A program of FSDP1 loads into an optimizer without any state, and demands none. From ours it gets a state to load
    into for each parameter, and a checkpoint has none of those that were never stepped.

    Of a tensor with fewer rows than ranks, some ranks have no chunk. The planner forgets it there, and then takes the
    checkpoint for one of an old torch, in which it finds nothing.
    """
    planner = importlib.import_module("torch.distributed.checkpoint.default_planner").DefaultLoadPlanner
    theirs = planner.create_local_plan

    @functools.wraps(theirs)
    def create_local_plan(self: Any) -> Any:
        if self.flatten_state_dict and self.metadata is not None:
            _put_back_forgotten(self)
            _leave_out_unstepped(self, self.metadata.state_dict_metadata)
        return theirs(self)

    return Patch(planner, "create_local_plan", create_local_plan)


def _put_back_forgotten(planner: Any) -> None:
    """Plan for the tensors that were left out because this rank has no part of them: there is nothing to read."""
    there, paths = flatten_state_dict(planner.original_state_dict)
    for key, value in there.items():
        if key not in planner.state_dict and is_sharded_tensor(value):
            planner.state_dict[key], planner.mappings[key] = value, paths[key]


def _leave_out_unstepped(planner: Any, there: Collection[str]) -> None:
    """Clear the entries of parameters of which nothing is `there`, and plan nothing for them."""
    keys: dict[int, list[str]] = {}
    entries: dict[int, FirstState] = {}
    for key, path in planner.mappings.items():
        entry = _first_state_at(planner.original_state_dict, path)
        if entry is not None:
            entries[id(entry)] = entry
            keys.setdefault(id(entry), []).append(key)
    for number, entry in entries.items():
        if not any(key in there for key in keys[number]):
            entry.clear()
            for key in keys[number]:
                del planner.state_dict[key], planner.mappings[key]


def _first_state_at(state: Any, path: tuple[Any, ...]) -> FirstState | None:
    """Return the entry of a parameter that `path` leads through."""
    for step in path:
        if isinstance(state, FirstState):
            return state
        if not isinstance(state, Mapping):
            return None
        state = state.get(step)
    return None
