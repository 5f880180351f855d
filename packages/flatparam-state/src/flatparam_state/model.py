"""The full state of a sharded model, as `state_dict()` of the unsharded model would have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from flatparam_runtime import Phase, clean_fqn, inspecting, shown, units_in
from flatparam_state.codec import fragments_of, gather
from flatparam_state.places import Place, places_in

__all__ = ["clean_keys", "full_state_shown", "hidden", "load_full", "model_state_dict"]


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
    places: dict[int, list[Place]] = {}
    for place in places_in(model):
        places.setdefault(id(place.unit), []).append(place)
    with contextlib.ExitStack() as stack:
        for unit in units_in(model):
            if unit.phase is Phase.INSPECTING:
                continue
            stack.enter_context(inspecting(unit))
            keep = not rank0_only or unit.plan.topology.shard.rank == 0
            values: list[list[nn.Parameter | None]] = []
            for place in places.get(id(unit), []):
                full = gather(place, place.handle.flat_param.detach(), device=device, keep=keep)
                parameters: list[nn.Parameter | None] = [
                    nn.Parameter(tensor, requires_grad=False) for tensor in full
                ]
                values.append(parameters or [None] * len(place.fqns))
            stack.enter_context(shown(unit, values))
        yield


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


@contextlib.contextmanager
def hidden(model: nn.Module) -> Iterator[list[Place]]:
    """Have the modules of `model` look as if they had no sharded parameters, so that `load_state_dict` passes over.

    Yields the flat parameters that were hidden by this call, and not by one around it.
    """
    before = {unit for unit in units_in(model) if unit.phase is Phase.INSPECTING}
    with contextlib.ExitStack() as stack:
        for unit in units_in(model):
            if unit not in before:
                stack.enter_context(inspecting(unit))
                nothing = [[None] * len(handle.layout.slots) for handle in unit.handles]
                stack.enter_context(shown(unit, nothing))
        yield [place for place in places_in(model) if place.unit not in before]


def load_full(
    places: Sequence[Place],
    state: MutableMapping[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
) -> None:
    """Take the parameters of `places` out of `state` and copy this rank's part of each to its shard.

    No communication. Where anything does not fit, `errors` says so and nothing is copied.

    Args:
        state: full tensors under clean names that begin with `prefix`; what is used is removed.
        missing: gets the names that are not in `state`; their parameters keep their values.
    """
    found = [(place, _take(place, state, prefix, missing, errors)) for place in places]
    if errors:
        return
    for place, tensors in found:
        layout, shard = place.handle.layout, place.handle.flat_param.detach()
        for fragment, part in zip(
            layout.fragments(place.handle.rank), fragments_of(place, tensors), strict=True
        ):
            if part is not None:
                shard[fragment.in_shard.as_slice()].copy_(part)


def _take(
    place: Place, state: MutableMapping[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> list[torch.Tensor | None]:
    tensors: list[torch.Tensor | None] = []
    for names, slot in zip(place.all_fqns, place.handle.layout.slots, strict=True):
        entries = [state.pop(prefix + name) for name in names if prefix + name in state]
        if not entries:
            missing.extend(prefix + name for name in names)
        value = entries[0] if entries else None
        if value is not None and not isinstance(value, torch.Tensor):
            errors.append(f"parameter {prefix + names[0]!r}: expected a tensor, found {type(value).__name__}")
        elif value is not None and tuple(value.shape) != slot.spec.shape:
            errors.append(
                f"parameter {prefix + names[0]!r}: expected shape {slot.spec.shape}, "
                f"found {tuple(value.shape)} in the state dict"
            )
        tensors.append(value)
    return tensors
