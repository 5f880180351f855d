"""An optimizer state by parameter names, in any form, back into the optimizer of a sharded model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flatparam_runtime import FlatParamError, clean_fqn, note_between_passes
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker
from flatparam_state.forms.deferred import shape_of
from flatparam_state.optimizer.entry import State, in_blocks
from flatparam_state.optimizer.held import (
    Held,
    Holding,
    held_parameters,
    numbered,
    of_parts,
    settings_at,
    settings_of,
    with_settings,
)
from flatparam_state.optimizer.inventory import agree_on_holdings
from flatparam_state.optimizer.saved_states import (
    SavedStates,
    arrived,
    check_shapes,
    check_states,
    has_cut_values,
    streamed,
)
from flatparam_state.places import Place, places_in
from flatparam_state.ranks import checksums, digest


@of_parts
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    chunker: Chunker | None = None,
    other_states: bool = True,
    is_compared: bool = False,
) -> dict[str, Any]:
    """Turn what `optimizer_state_dict` returned into what this rank's `optimizer.load_state_dict` takes.

    The world size and the units may have changed in between; the state may hold more parameters than the optimizer.
    Every rank calls it. Nothing is moved between ranks for full tensors, nor for sharded ones that are cut like the
    model is; the memory beyond the result is at most one full tensor, or two if it has to be gathered, and what the
    threads of gloo (two) have not let go of yet.

    Args:
        rank0_only: only the first rank has the (full) state; what the others pass is not looked at. Its tensors are
            sent one after the other.
        is_named: the optimizer's state has names as keys, not numbers; what it has for parameters without a saved
            state stays.
        chunker: what takes torch's sharded tensors apart.
        other_states: take the states of a different optimizer, too, as torch does; see `check_states`.
        is_compared: all ranks are known to have the same values.

    Raises:
        FlatParamError: if something does not fit, naming the parameter, the state and what to do. Nothing is
            changed then.
    """
    state_dict = _with_clean_names(state_dict)
    if rank0_only:
        state_dict = streamed(model, state_dict)
    places = list(places_in(model))
    moves_between_ranks = rank0_only or has_cut_values(state_dict)
    try:
        saved, saved_groups = _checked(state_dict)
        holding = Holding.of(model, optimizer)
        if not other_states:
            check_states(optimizer, holding, saved)
        check_shapes(optimizer, holding, saved)
    except FlatParamError as error:
        if moves_between_ranks:
            agree_on_holdings(places, (), error=error)
        raise
    held = agree_on_holdings(places, holding.by_group) if moves_between_ranks else {}
    states = SavedStates.of(holding, saved, chunker or OWN_CHUNKER)
    loaded = _loaded(model, places, holding, held, states)
    state: dict[Any, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    current = optimizer.state_dict() if is_named else None
    for number, (keys, (group, found)) in enumerate(zip(_keys(holding, current), holding.groups, strict=True)):
        for key, item in zip(keys, found, strict=True):
            values = loaded[item]
            if values:
                state[key] = values
            elif current is not None and key in current["state"]:
                state[key] = current["state"][key]
        if saved_groups is not None:
            names = [fqn for item in found for fqn in with_settings(item, saved, saved_groups)]
            settings = settings_of(names, saved_groups) if found else settings_at(number, saved_groups, holding)
            groups.append({**group, **settings, "params": list(keys)})
    if saved_groups is None:
        of_parameters = {fqn for item in held_parameters(model).values() for fqn in item.fqns}
    else:
        of_parameters = {fqn for group in saved_groups for fqn in group["params"]}
    others = {key: arrived(value) for key, value in saved.items() if key not in of_parameters}
    told = {"state": {**state, **others}}
    # Not before: what is refused is not noted.
    if not (rank0_only or is_compared):
        what = f"load of an optimizer state with the values {_digest(places, saved):016x}"
        note_between_passes((place.unit for place in places), what)
    return told if saved_groups is None else {**told, "param_groups": groups}


def _digest(places: Sequence[Place], saved: State) -> int:
    """Return a digest of the full tensors and the counters in `saved`, which are to be the same on all ranks."""
    shapes = {
        fqn: slot.spec.shape
        for place in places
        # Ranks may have other values of parameters that they do not share, such as experts.
        if place.unit.topology == places[0].unit.topology
        for fqn, slot in zip(place.fqns, place.handle.layout.slots, strict=True)
    }
    return digest(
        checksums(
            {
                f"{fqn}.{name}": value
                for fqn, values in saved.items()
                for name, value in values.items()
                if fqn in shapes and isinstance(value, torch.Tensor) and shape_of(value) in ((), shapes[fqn])
            }
        )
    )


def _loaded(
    model: nn.Module, places: Sequence[Place], holding: Holding, held: Collection[str], states: SavedStates
) -> dict[Held, dict[str, Any]]:
    """The state of each parameter that the optimizer holds, made in the order of the model, the same on every rank.

    A rank that has no element of a parameter, and so need not hold it, takes part in what the others do for it.
    """
    mine = _by_place(holding.items)
    known = _by_place(held_parameters(model).values())
    order = [
        mine.get(at) or known[at]
        for place in places
        for index, fqn in enumerate(place.fqns)
        if (at := (id(place.handle), index)) in mine or fqn in held
    ]
    order += sorted((item for item in holding.items if item.place is None), key=lambda item: item.fqns)
    loaded: dict[Held, dict[str, Any]] = {}
    for item in dict.fromkeys(order):
        names = list(dict.fromkeys(name for fqn in item.fqns for name in states.saved.get(fqn, {})))
        values = {name: states.value(item, name) for name in sorted(names)}
        kept = {name: values[name] for name in names if item.has_own(name)}
        loaded[item] = in_blocks(kept, item.parameter)
    return loaded


def _by_place(items: Iterable[Held]) -> dict[tuple[int, int], Held]:
    """By handle and index there, the first of `items` for each."""
    found: dict[tuple[int, int], Held] = {}
    for item in items:
        if item.place is not None:
            for index in item.indices:
                found.setdefault((id(item.place.handle), index), item)
    return found


def _keys(holding: Holding, current: Mapping[str, Any] | None) -> list[list[Any]]:
    """For each group, the keys that the optimizer gives to its parameters."""
    if current is None:
        return [list(numbers) for numbers in numbered([found for _, found in holding.groups])]
    keys = [key for group in current["param_groups"] for key in group["params"]]
    by_item = {item: key for key, item in holding.resolve(keys).items()}
    return [[by_item[item] for item in found] for _, found in holding.groups]


def _with_clean_names(state_dict: Any) -> Any:
    """Return the state with the names of the unsharded model; FSDP1 saves `_orig_mod` in those of a compiled one."""
    # What has another form is refused later, or is not looked at: another rank gives it.
    if not isinstance(state_dict, Mapping):
        return state_dict

    def clean(name: Any) -> Any:
        return clean_fqn(name) if isinstance(name, str) else name

    named = dict(state_dict)
    if isinstance(named.get("state"), Mapping):
        named["state"] = {clean(key): value for key, value in named["state"].items()}
    if isinstance(named.get("param_groups"), list):
        named["param_groups"] = [
            {**group, "params": [*map(clean, group["params"])]}
            if isinstance(group, Mapping) and "params" in group
            else group
            for group in named["param_groups"]
        ]
    return named


def _checked(state_dict: Any) -> tuple[State, Sequence[Mapping[str, Any]] | None]:
    """Return the state and the groups of `state_dict`; a state without groups, as some programs pass on, has none."""
    if not isinstance(state_dict, Mapping) or not ("param_groups" in state_dict or state_dict.get("state")):
        found = f"the keys {sorted(map(str, state_dict))}" if isinstance(state_dict, Mapping) else repr(state_dict)
        raise FlatParamError(
            f"expected an optimizer state with 'state' and 'param_groups', found {found}; every rank needs it: "
            "if it was saved with rank0_only, load it on every rank, or load it with rank0_only too, so that it is "
            "sent from rank 0"
        )
    # A checkpoint has no entry for an empty dict, which the state of plain SGD is.
    state, groups = state_dict.get("state", {}), state_dict.get("param_groups")
    names = [*state, *(name for group in groups or () for name in group["params"])]
    for name in names:
        if not isinstance(name, str):
            raise FlatParamError(
                f"expected an optimizer state by parameter names, found the key {name!r}; it looks like "
                "the state_dict() of an ordinary optimizer, which numbers parameters: give its keys names first "
                "(rekey_optim_state_dict does)"
            )
    return state, groups
