"""An optimizer state by parameter names, in any form, back into the optimizer of a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam_runtime import FlatParamError
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker, is_dtensor
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.forms.wanted import (
    Stored,
    Streamed,
    Wanted,
    as_tensor,
    from_first,
    is_tensor_like,
    shape_of,
)
from flatparam_state.optimizer.collect import COUNTERS, PER_RANK, copy_value, is_equal
from flatparam_state.optimizer.held import Held, Holding, held_parameters, numbered
from flatparam_state.optimizer.inventory import agree_on_holdings
from flatparam_state.places import Place, places_in

__all__ = ["AsItIs", "load_optimizer_state"]

State = Mapping[str, Mapping[str, Any]]

_NAMES = frozenset({"params", "param_names"})
"""The entries of a group that name its parameters; the others are settings."""


@final
@attrs.frozen(eq=False)
class AsItIs:
    """A saved state that belongs to its parameter as a whole, whatever its shape."""

    value: Any


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    chunker: Chunker | None = None,
) -> dict[str, Any]:
    """Turn what `optimizer_state_dict` returned into what this rank's `optimizer.load_state_dict` takes.

    The world size and the units may have changed in between; the state may hold more parameters than the optimizer.
    Every rank calls it. Nothing is moved between ranks for full tensors, nor for sharded ones that are cut like the
    model is; the memory beyond the result is at most one full tensor, or two where it has to be gathered.

    Args:
        rank0_only: only the first rank has the (full) state; what the others pass is not looked at. Its tensors are
            sent one after the other.
        is_named: the optimizer's state has names as keys, not numbers; what it has for parameters without a saved
            state stays.
        chunker: what takes torch's sharded tensors apart.

    Raises:
        FlatParamError: where something does not fit, naming the parameter, the state and what to do. Nothing is
            changed then.
    """
    if rank0_only:
        state_dict = _streamed(model, state_dict)
    places = list(places_in(model))
    moves_between_ranks = rank0_only or _has_cut_values(state_dict)
    try:
        saved, saved_groups = _checked(state_dict)
        holding = Holding.of(model, optimizer)
    except FlatParamError as error:
        if moves_between_ranks:
            agree_on_holdings(places, (), error=error)
        raise
    held = agree_on_holdings(places, holding.by_group) if moves_between_ranks else {}
    kinds = _Kinds.of(holding, saved, chunker or OWN_CHUNKER)
    loaded = _loaded(model, places, holding, held, kinds)
    state: dict[Any, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    current = optimizer.state_dict() if is_named else None
    for keys, (group, found) in zip(_keys(holding, current), holding.groups, strict=True):
        for key, item in zip(keys, found, strict=True):
            values = loaded[item]
            if values:
                state[key] = values
            elif current is not None and key in current["state"]:
                state[key] = current["state"][key]
        settings = _settings(
            [fqn for item in found for fqn in _with_settings(item, saved, saved_groups)], saved_groups
        )
        groups.append({**group, **settings, "params": list(keys)})
    of_parameters = {fqn for group in saved_groups for fqn in group["params"]}
    others = {key: _arrived(value) for key, value in saved.items() if key not in of_parameters}
    return {"state": {**state, **others}, "param_groups": groups}


def _loaded(
    model: nn.Module, places: Sequence[Place], holding: Holding, held: Collection[str], kinds: _Kinds
) -> dict[Held, dict[str, Any]]:
    """The state of each parameter that the optimizer holds, made in the order of the model, the same on every rank.

    A rank that has no element of a parameter, and so need not hold it, takes part in what the others do for it.
    """
    mine = _by_place(holding.items)
    known = _by_place(held_parameters(model).values())
    order = [
        mine.get(at) or known[at]
        for place in places
        for at, fqn in zip(_places_of_parameters(place), place.fqns, strict=True)
        if at in mine or fqn in held
    ]
    order += sorted((item for item in holding.items if item.place is None), key=lambda item: item.fqns)
    loaded: dict[Held, dict[str, Any]] = {}
    for item in dict.fromkeys(order):
        names = list(dict.fromkeys(name for fqn in item.fqns for name in kinds.saved.get(fqn, {})))
        values = {name: kinds.value(item, name) for name in sorted(names)}
        loaded[item] = {} if item.is_elsewhere else {name: values[name] for name in names}
    return loaded


def _by_place(items: Iterable[Held]) -> dict[tuple[int, int], Held]:
    """By handle and index there, the first of `items` for each."""
    found: dict[tuple[int, int], Held] = {}
    for item in items:
        if item.place is not None:
            for index in item.indices:
                found.setdefault((id(item.place.handle), index), item)
    return found


def _places_of_parameters(place: Place) -> list[tuple[int, int]]:
    return [(id(place.handle), index) for index in range(len(place.fqns))]


def _arrived(value: Any) -> Any:
    """A value that is no parameter's state, on every rank."""
    if isinstance(value, Mapping):
        return {key: _arrived(each) for key, each in value.items()}
    return value.arrive() if isinstance(value, Streamed) else value


def _keys(holding: Holding, current: Mapping[str, Any] | None) -> list[list[Any]]:
    """For each group, the keys that the optimizer gives to its parameters."""
    if current is None:
        return [list(numbers) for numbers in numbered([found for _, found in holding.groups])]
    keys = [key for group in current["param_groups"] for key in group["params"]]
    by_item = {item: key for key, item in holding.resolve(keys).items()}
    return [[by_item[item] for item in found] for _, found in holding.groups]


def _streamed(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first rank's state, on every rank, with stand-ins for its tensors."""
    place = next(iter(places_in(model)), None)
    if place is None:
        return state_dict
    topology, device = place.unit.plan.topology, place.handle.device

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
        return _concrete(value)

    def arriving(fqn: str, name: str, value: Any) -> Any:
        if not isinstance(value, Streamed):
            return value
        here = state_dict["state"][fqn][name] if is_first else None
        return attrs.evolve(value, topology=topology, device=device, tensor=here)

    is_first = all(group is None or group.rank == 0 for group in (topology.shard, topology.replicate))
    skeleton = mapped(state_dict, described) if is_first else None
    return mapped(from_first(topology, skeleton, label="optimizer state"), arriving)  # type: ignore[no-any-return]


def _checked(state_dict: Any) -> tuple[State, Sequence[Mapping[str, Any]]]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = (
            f"the keys {sorted(map(str, state_dict))}"
            if isinstance(state_dict, Mapping)
            else repr(state_dict)
        )
        raise FlatParamError(
            f"expected an optimizer state with 'state' and 'param_groups', found {found}; every rank needs it: "
            "if it was saved with rank0_only, load it on every rank, or load it with rank0_only too, so that it is "
            "sent from rank 0"
        )
    names = [
        *state_dict["state"],
        *(name for group in state_dict["param_groups"] for name in group["params"]),
    ]
    for name in names:
        if not isinstance(name, str):
            raise FlatParamError(
                f"expected an optimizer state by parameter names, found the key {name!r}; it looks like "
                "the state_dict() of an ordinary optimizer, which numbers parameters: give its keys names first "
                "(rekey_optim_state_dict does)"
            )
    return state_dict["state"], state_dict["param_groups"]


@attrs.frozen(eq=False)
class _Kinds:
    """Which of the saved states are shaped like their parameters."""

    saved: State
    chunker: Chunker
    shaped: frozenset[str]

    @classmethod
    def of(cls, holding: Holding, saved: State, chunker: Chunker) -> _Kinds:
        """Look at every state of every parameter that the optimizer holds.

        A 0-d state of a 0-d parameter does not say which it is; what the name is elsewhere does.
        """
        fits: dict[str, int] = {}
        unlike: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        unclear: set[str] = set()
        for item in holding.items:
            for fqn, wanted in _wanted(item).items():
                for name, value in saved.get(fqn, {}).items():
                    if isinstance(value, AsItIs):
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
        """What this rank's optimizer holds of one state of one of its parameters."""
        entries = {
            fqn: _concrete(self.saved[fqn][name]) for fqn in item.fqns if name in self.saved.get(fqn, {})
        }
        own = {fqn: _of_this_rank(item, fqn, name, value) for fqn, value in entries.items()}
        if (
            item.place is not None
            and (name in self.shaped or any(_is_cut(value) for value in entries.values()))
            and not any(isinstance(value, AsItIs) or _is_per_rank(value) for value in entries.values())
            and any(value is not None for value in own.values())
        ):
            return _sharded(item, name, own, self.chunker)
        own = {fqn: _read(value) for fqn, value in own.items()}
        first_fqn, first = next(iter(own.items()))
        for fqn, value in own.items():
            if not is_equal(value, first):
                raise FlatParamError(
                    f"optimizer state {name!r} is {first!r} for {first_fqn!r} and {value!r} for {fqn!r}, "
                    "which lie in one flat parameter and can have only one; shard with use_orig_params=True, or make "
                    "them units of their own"
                )
        return copy_value(first, None)


def _has_cut_values(state_dict: Any) -> bool:
    """Whether some state is cut over ranks, which then have to communicate; the same on every rank."""
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    entries = state.values() if isinstance(state, Mapping) else ()
    return any(
        map(_is_cut, (value for each in entries if isinstance(each, Mapping) for value in each.values()))
    )


def _is_cut(value: Any) -> bool:
    """Whether ranks hold parts of it, so that it can only be shaped like the parameter."""
    return is_sharded_tensor(value) or is_dtensor(value)


def _concrete(value: Any) -> Any:
    """The tensor, if `value` stands for one."""
    is_stand_in = is_tensor_like(value) and not isinstance(value, torch.Tensor)
    return as_tensor(value) if is_stand_in else value


def _wanted(item: Held) -> dict[str, Wanted]:
    if item.place is None:
        return {}
    return {
        fqn: Wanted.of_parameter(item.place, index)
        for fqn, index in zip(item.fqns, item.indices, strict=True)
    }


def _is_per_rank(value: Any) -> bool:
    return isinstance(value, Mapping) and PER_RANK in value


def _of_this_rank(item: Held, fqn: str, name: str, value: Any) -> Any:
    """The value itself, or of one for each rank the one that was saved for what this rank holds."""
    if isinstance(value, Streamed) and item.place is None:
        return value.arrive()
    if isinstance(value, AsItIs) or (isinstance(value, Stored) and item.place is None):
        return _read(value)
    if not _is_per_rank(value):
        return value
    span = _wanted(item)[fqn].span if item.place is not None else None
    for each in value[PER_RANK]:
        if span is not None and list(each["interval"]) == [span.start, span.stop]:
            return _read(each["value"])
    if span is not None and not span:  # of nothing there is nothing
        other = _read(value[PER_RANK][0]["value"])
        return other[:0] if isinstance(other, torch.Tensor) and other.dim() else other
    saved = ", ".join(f"[{each['interval'][0]}, {each['interval'][1]})" for each in value[PER_RANK])
    raise FlatParamError(
        f"optimizer state {name!r} of {fqn!r} belongs to the parts of the parameter that the ranks held when it was "
        f"saved, elements {saved}; this rank holds {'all' if span is None else f'[{span.start}, {span.stop})'}: load "
        "it with as many ranks and the same wrapping as it was saved with, or leave this state out"
    )


def _read(value: Any) -> Any:
    value = value.value if isinstance(value, AsItIs) else value
    return value.whole() if isinstance(value, Stored) else value


def _sharded(item: Held, name: str, entries: Mapping[str, Any], chunker: Chunker) -> torch.Tensor:
    assert item.place is not None, "called for sharded parameters only"
    layout, rank = item.place.handle.layout, item.place.handle.rank
    found = {fqn: value for fqn, value in entries.items() if value is not None}
    wanted = _wanted(item)
    for fqn, value in found.items():
        other = wanted[fqn].misfit(value)
        if other is not None:
            raise FlatParamError(
                f"optimizer state {name!r} of {fqn!r}: expected a tensor of shape {wanted[fqn].spec.shape}, found "
                f"{other if not isinstance(value, (int, float, str)) else repr(value)}; the state was saved from "
                "another model"
            )
    if not item.is_flat:
        (fqn,) = item.fqns
        part = wanted[fqn].part(found[fqn], chunker)
        is_own = isinstance(found[fqn], Stored)
        return part.to(item.parameter.device, copy=not is_own).view(item.parameter.shape)
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in found.values()))
    shard = torch.zeros(layout.shard_numel, dtype=dtype, device=item.parameter.device)
    for fqn, index in zip(item.fqns, item.indices, strict=True):
        if fqn in found:
            target = shard[layout.fragment(index, rank).in_shard.as_slice()]
            target.copy_(wanted[fqn].part(found[fqn], chunker))
    return shard


def _with_settings(item: Held, saved: State, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `item` that the saved groups must have; one that no unit holds may have been in no optimizer."""
    known = {name for group in groups for name in group["params"]} | saved.keys()
    return [fqn for fqn in item.fqns if item.place is not None or fqn in known]


def _settings(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that the saved groups give to the parameters `names`, which must be the same for all."""
    if not names:
        return {}
    home = {name: group for group in groups for name in group["params"]}
    for name in names:
        if name not in home:
            raise FlatParamError(
                f"no parameter group of the saved optimizer state holds {name!r}; it was saved from "
                "another model, or the optimizer then did not hold this parameter"
            )
    first = {key: value for key, value in home[names[0]].items() if key not in _NAMES}
    for name in names[1:]:
        other = home[name]
        for key in sorted(first.keys() | (other.keys() - _NAMES)):  # every rank names the same
            if not is_equal(first.get(key), other.get(key)):
                raise FlatParamError(
                    f"the saved optimizer state has {key}={first.get(key)!r} for {names[0]!r} and "
                    f"{other.get(key)!r} for {name!r}, which are in one parameter group now; give the optimizer the "
                    "groups that it had, with use_orig_params=True where a flat parameter joins them"
                )
    return first
