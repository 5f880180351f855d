"""The saved states of parameters, and what this rank's optimizer takes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from flatparam_runtime import COUNTERS, FlatParamError
from flatparam_state.forms.chunker import Chunker, is_dtensor
from flatparam_state.forms.deferred import (
    LazyValue,
    Streamed,
    as_tensor,
    from_first,
    is_tensor_like,
    shape_of,
)
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.optimizer.entry import AsItIs, PerRank, State, copy_value, is_equal, is_per_rank
from flatparam_state.optimizer.held import Held, Holding
from flatparam_state.optimizer.misfits import described, misfit_error, wanted_of
from flatparam_state.places import places_in

__all__ = ["SavedStates", "concrete", "has_cut_values", "arrived", "streamed"]


@attrs.frozen(eq=False)
class SavedStates:
    """The saved states of parameters, and which of them are shaped like their parameters."""

    saved: State
    chunker: Chunker
    shaped: frozenset[str]
    """The names of the states that are shaped like their parameters."""

    @classmethod
    def of(cls, holding: Holding, saved: State, chunker: Chunker) -> SavedStates:
        """Look at every state of every parameter that the optimizer holds.

        A 0-d state of a 0-d parameter does not say which it is; what the name is elsewhere does.
        """
        fits: dict[str, int] = {}
        unlike: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        unclear: set[str] = set()
        for item in holding.items:
            for fqn, wanted in wanted_of(item).items():
                for name, value in saved.get(fqn, {}).items():
                    if isinstance(value, AsItIs) or (
                        item.part_states is not None and name not in item.part_states
                    ):
                        unlike[name] = unlike.get(name, 0) + 1
                    elif wanted.misfit(value) is not None:
                        unlike[name] = unlike.get(name, 0) + (isinstance(value, torch.Tensor))
                    elif wanted.spec.shape == ():
                        unclear.add(name)
                    else:
                        fits[name] = fits.get(name, 0) + 1
        likely = {name for name, count in fits.items() if count >= unlike.get(name, 0)}
        return cls(saved, chunker, frozenset(likely | {name for name in unclear if name not in unlike}))

    def value(self, item: Held, name: str) -> Any:
        """Return the state `name` of one parameter of this rank's optimizer, as the optimizer holds it."""
        entries = {
            fqn: concrete(self.saved[fqn][name]) for fqn in item.fqns if name in self.saved.get(fqn, {})
        }
        own = {fqn: _of_this_rank(item, fqn, name, value) for fqn, value in entries.items()}
        if (
            item.place is not None
            and (name in self.shaped or any(_is_cut(value) for value in entries.values()))
            and not any(isinstance(value, AsItIs) or is_per_rank(value) for value in entries.values())
            and any(value is not None for value in own.values())
        ):
            return _sharded(item, name, own, self.chunker)
        own = {fqn: _read(value) for fqn, value in own.items()}
        first_fqn, first = next(iter(own.items()))
        for fqn, value in own.items():
            if not is_equal(value, first):
                raise FlatParamError(
                    f"optimizer state {name!r} is {described(first)} for {first_fqn!r} and {described(value)} for "
                    f"{fqn!r}, which lie in one flat parameter and can have only one; shard with "
                    "use_orig_params=True, or make them units of their own"
                )
        return copy_value(first, None)


def has_cut_values(state_dict: Any) -> bool:
    """Return whether some state is cut over ranks, which then have to communicate; the same on every rank."""
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    entries = state.values() if isinstance(state, Mapping) else ()
    return any(
        map(_is_cut, (value for each in entries if isinstance(each, Mapping) for value in each.values()))
    )


def _is_cut(value: Any) -> bool:
    """Return whether ranks hold parts of it, so that it can only be shaped like the parameter."""
    return is_sharded_tensor(value) or is_dtensor(value)


def concrete(value: Any) -> Any:
    """Return the tensor, if `value` stands for one."""
    is_stand_in = is_tensor_like(value) and not isinstance(value, torch.Tensor)
    return as_tensor(value) if is_stand_in else value


def _of_this_rank(item: Held, fqn: str, name: str, value: Any) -> Any:
    """Return the value itself, or of one for each rank the one that was saved for what this rank holds."""
    if isinstance(value, Streamed) and item.place is None:
        return value.arrive()
    if isinstance(value, AsItIs) or (isinstance(value, LazyValue) and item.place is None):
        return _read(value)
    if not is_per_rank(value):
        return value
    span = wanted_of(item)[fqn].span if item.place is not None else None
    values = PerRank.from_entry(value).values
    for part, each in values:
        if part == span:
            return _read(each)
    # Of nothing there is nothing.
    if span is not None and not span:
        other = _read(values[0][1])
        return other[:0] if isinstance(other, torch.Tensor) and other.dim() else other
    saved = ", ".join(f"[{part.start}, {part.stop})" for part, _ in values)
    raise FlatParamError(
        f"optimizer state {name!r} of {fqn!r} belongs to the parts of the parameter that the ranks held when it was "
        f"saved, elements {saved}; this rank holds {'all' if span is None else f'[{span.start}, {span.stop})'}: load "
        "it with as many ranks and the same wrapping as it was saved with, or leave this state out"
    )


def _read(value: Any) -> Any:
    value = value.value if isinstance(value, AsItIs) else value
    if isinstance(value, Streamed):
        # It belongs to the parameter as a whole; every rank reads it here.
        return value.arrive()
    return value.whole() if isinstance(value, LazyValue) else value


def _sharded(item: Held, name: str, entries: Mapping[str, Any], chunker: Chunker) -> torch.Tensor:
    assert item.place is not None, "called for sharded parameters only"
    layout, rank = item.place.handle.layout, item.place.handle.rank
    found = {fqn: value for fqn, value in entries.items() if value is not None}
    wanted = wanted_of(item)
    for fqn, value in found.items():
        other = wanted[fqn].misfit(value)
        if other is not None:
            is_plain = isinstance(value, (int, float, str))
            raise misfit_error(name, fqn, wanted[fqn], described(value) if is_plain else other)
    if not item.is_flat:
        (fqn,) = item.fqns
        part = wanted[fqn].part(found[fqn], chunker)
        is_own = isinstance(found[fqn], LazyValue)
        return part.to(item.parameter.device, copy=not is_own).view(item.parameter.shape)
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in found.values()))
    shard = torch.zeros(item.place.handle.flat_param.numel(), dtype=dtype, device=item.parameter.device)
    for fqn, index in zip(item.fqns, item.indices, strict=True):
        if fqn in found:
            target = shard[layout.fragment(index, rank).in_shard.as_slice()]
            target.copy_(wanted[fqn].part(found[fqn], chunker))
    return shard


# Those that only the first rank has: described to all ranks, and sent tensor by tensor when they are needed


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
