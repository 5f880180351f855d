"""The full state of a sharded model, as `state_dict()` of the unsharded model would have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from flatparam_runtime import Phase, clean_fqn, inspecting, shown, units_in
from flatparam_state.codec import gather
from flatparam_state.places import Place, places_of

__all__ = ["clean_keys", "full_state_shown", "model_state_dict"]


@contextlib.contextmanager
def full_state_shown(
    model: nn.Module, *, offload_to_cpu: bool = False, rank0_only: bool = False
) -> Iterator[None]:
    """Have `model.state_dict()` find full parameters, in the parameters' own dtype; every rank enters it.

    The units are gathered one after the other: the extra memory is the full state itself and one unit. What is inside
    already (a submodule's `state_dict` in its parent's) is left alone.

    Args:
        offload_to_cpu: put the full parameters on the CPU.
        rank0_only: only rank 0 of each unit keeps them; elsewhere the parameters are absent from the state.
    """
    device = torch.device("cpu") if offload_to_cpu else None
    units = dict.fromkeys(each for unit in units_in(model) for each in (*unit.lenders, unit))
    with contextlib.ExitStack() as stack:
        for unit in units:
            if unit.phase is Phase.INSPECTING:
                continue
            stack.enter_context(inspecting(unit))
            keep = not rank0_only or unit.plan.topology.group.rank == 0
            values: list[list[nn.Parameter | None]] = []
            for place in places_of(unit)[: len(unit.handles)]:
                full = _full(place, device, keep)
                parameters: list[nn.Parameter | None] = [
                    nn.Parameter(place.handle.present(index, tensor), requires_grad=False)
                    for index, tensor in enumerate(full)
                ]
                values.append(parameters or [None] * len(place.fqns))
            stack.enter_context(shown(unit, values))
        yield


def _full(place: Place, device: torch.device | None, keep: bool) -> list[torch.Tensor]:
    """Copies of the full parameters; of summoned ones as they are now, with what was changed there."""
    if not place.unit.pins:
        return gather(place, place.handle.flat_param.detach(), device=device, keep=keep)
    return [leaf.detach().to(device or leaf.device, copy=True) for leaf in place.handle.leaves if keep]


def model_state_dict(
    model: nn.Module, *, offload_to_cpu: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """The full state of `model` under clean names; every rank calls it. See `full_state_shown`."""
    with full_state_shown(model, offload_to_cpu=offload_to_cpu, rank0_only=rank0_only):
        state = model.state_dict()
    clean_keys(state, "")
    return state


def clean_keys(state: MutableMapping[str, Any], prefix: str) -> None:
    """Rename the entries of `state` below `prefix` to what they are called in the unsharded model, in place."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + clean_fqn(key[len(prefix) :])] = state.pop(key)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        for key in list(metadata):
            metadata[clean_fqn(key)] = metadata.pop(key)
