"""The state of an optimizer over sharded parameters, by parameter name, in any of the forms."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatparam_runtime import FlatParamError
from flatparam_state.forms.state_form import StateForm
from flatparam_state.optimizer.entry import copy_value
from flatparam_state.optimizer.exchange import sharded_states
from flatparam_state.optimizer.first_state import FirstState, first_states
from flatparam_state.optimizer.held import Held, Holding, complete_groups, of_parts, with_names
from flatparam_state.optimizer.inventory import agree_on_holdings, with_states
from flatparam_state.optimizer.quantised import spread_out
from flatparam_state.places import places_in

__all__ = ["optimizer_state_dict"]


@of_parts
def optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
    form: StateForm | None = None,
    state_dict: Mapping[str, Any] | None = None,
    first_state: bool = False,
) -> dict[str, Any]:
    """Return the state as `{"state": {fqn: {name: value}}, "param_groups": [...]}`; every rank calls it.

    A tensor that is shaped like its parameter's sharded form becomes full, or sharded like the parameter's shape, as
    the form says; full ones are gathered one flat parameter at a time. Of any other value there is one if all ranks
    have the same, else one for each rank (see `PER_RANK`). The groups list names in `"params"`. A tied parameter has
    the first of its names in the model.

    Args:
        offload_to_cpu: put tensors on the CPU.
        rank0_only: only rank 0 gets the state, other ranks an empty dict.
        form: instead of the two; see `StateForm`.
        state_dict: what `optimizer.state_dict()` gave, by number or by name; by default it is asked. If it has no
            groups, the result has none.
        first_state: for each trained parameter that no rank's optimizer has a state of yet, the result has what its
            first step will start from, as a `FirstState`, so that programs can load into it, and find it. The
            optimizer is not changed. If it cannot make a state, there is none, with a warning if it has none at all.

    Raises:
        FlatParamError: on every rank, if an optimizer holds a parameter that is not the model's, the state one that the
            optimizer does not hold, or if a rank's optimizer lacks a parameter or a state that another rank's has.
    """
    form = form or StateForm(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
    raw = optimizer.state_dict() if state_dict is None else state_dict
    places = list(places_in(model))
    try:
        holding = Holding.of(model, optimizer)
        states, others = _by_parameter(raw["state"], holding)
    except FlatParamError as error:
        agree_on_holdings(places, (), error=error)
        raise
    held = agree_on_holdings(places, holding.by_group, states)
    new: dict[Held, Mapping[str, Any]] = {}
    stepped: frozenset[str] | None = None
    if first_state and state_dict is None:
        made = _first_states(optimizer, holding, states)
        stepped = with_states(places, states, made is not None)
        if stepped is not None:
            # Of some states, only one rank has those of a whole parameter.
            new = {item: values for item, values in (made or {}).items() if stepped.isdisjoint(item.fqns)}
    found: dict[str, dict[str, Any]] = {}
    with_owners = any(item.part_states is not None for item in holding.items)
    for place, fqn, name, value in sharded_states(places, states | new, form, with_owners=with_owners):
        if form.keeps(place):
            is_stepped = stepped is None or fqn in stepped
            found.setdefault(fqn, {} if is_stepped else FirstState())[name] = value
    for item, values in (states | new).items():
        if item.place is None:
            copies = {name: copy_value(value, form.device) for name, value in values.items()}
            found[item.fqns[0]] = FirstState(copies) if item in new else copies
    if form.rank0_only and places and places[0].unit.topology.group.rank != 0:
        return {}
    names = dict.fromkeys([*(fqn for item in holding.items for fqn in item.fqns), *held])
    named: dict[str, Any] = {"state": {fqn: found[fqn] for fqn in names if fqn in found} | others}
    if "param_groups" in raw:
        meant = holding.resolve(key for group in raw["param_groups"] for key in group["params"])
        groups = [with_names(each, [meant[key] for key in each["params"]]) for each in raw["param_groups"]]
        complete_groups(groups, held)
        named["param_groups"] = groups
    return named


def _by_parameter(
    state: Mapping[Any, Mapping[str, Any]], holding: Holding
) -> tuple[dict[Held, Mapping[str, Any]], dict[Any, Any]]:
    """Return the states of parameters, and what else there is."""
    meant = holding.resolve(state)
    others = {key: copy_value(value, None) for key, value in state.items() if key not in meant}
    for key in others:
        if not isinstance(key, str):
            raise FlatParamError(
                f"the optimizer's state has an entry for parameter {key!r}, of which it holds {len(holding.items)}; "
                "pass the state_dict() of this very optimizer"
            )
        warnings.warn(
            f"the optimizer's state has an entry {key!r}, which is no parameter of the model; it is passed on as it is",
            stacklevel=4,
        )
    return {item: spread_out(state[key]) for key, item in meant.items()}, others


def _first_states(
    optimizer: torch.optim.Optimizer, holding: Holding, states: Mapping[Held, Mapping[str, Any]]
) -> dict[Held, Mapping[str, Any]] | None:
    """The states that the first step of those without any will start from; `None` if the optimizer cannot say."""
    try:
        return {item: spread_out(values) for item, values in first_states(optimizer, holding, states).items()}
    except Exception as error:
        if not states:
            warnings.warn(
                f"{type(optimizer).__name__} has no state yet, and cannot make one before its first step ({error}): "
                "its saved state cannot be loaded, and the optimizer would start from zero; load a full state instead",
                stacklevel=4,
            )
        return None
