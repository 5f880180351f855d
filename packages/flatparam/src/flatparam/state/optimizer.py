"""The state of an optimizer whose parameters are sharded, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatparam.api import StateDictType
from flatparam.debug_log import SimpleProfiler
from flatparam.sharding.extensions import chunker
from flatparam.state.form_settings import default_settings, form_of, settings_of
from flatparam_comm import resolve_topology, telling
from flatparam_core import FlatParamError
from flatparam_state import FormKind, StateForm, load_optimizer_state, optimizer_state_dict
from flatparam_state.places import places_in


def optim_form(model: nn.Module) -> StateForm:
    """Return the form of optimizer state that the settings of the wrappers in `model` ask for."""
    settings = settings_of(model) or default_settings()
    kind = settings.state_dict_type
    # As in FSDP1, there is no local form of an optimizer's state.
    if kind is StateDictType.LOCAL_STATE_DICT:
        kind = StateDictType.SHARDED_STATE_DICT
    return form_of(kind, settings.optim_state_dict_config)


@telling("optim_state_dict")
def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any] | None, group: Any
) -> dict[str, Any]:
    """Return the optimizer's state in the form that was chosen; see `optim_state_dict` of the wrapper.

    A sharded one may be what a checkpoint is loaded into, so it is whole before the first step, too.
    """
    check_group(model, group)
    form = optim_form(model)
    is_loaded_into = form.kind is FormKind.SHARDED
    return optimizer_state_dict(model, optim, form=form, state_dict=state, first_state=is_loaded_into)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    is_named: bool,
    load_directly: bool,
    group: Any,
) -> dict[str, Any]:
    """Return this rank's part of a state of any form; see `optim_state_dict_to_load` of the wrapper."""
    check_group(model, group)
    rank0_only = optim_form(model).rank0_only
    return to_load(model, optim, state, rank0_only=rank0_only, is_named=is_named, load_directly=load_directly)


@telling("optim_state_dict_to_load")
def to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state: Any,
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    load_directly: bool = False,
) -> dict[str, Any]:
    """Return this rank's part of an optimizer state; see `optim_state_dict_to_load`."""
    with SimpleProfiler.profile(SimpleProfiler.Type.ALL):
        loaded = load_optimizer_state(model, optim, state, rank0_only=rank0_only, is_named=is_named, chunker=chunker())
    SimpleProfiler.dump_and_reset("FSDP optim_state_dict_to_load() profiling:")
    if load_directly and "param_groups" not in loaded:
        raise FlatParamError(
            "optim_state_dict_to_load: with load_directly=True, expected an optimizer state with 'param_groups', found "
            "one without; leave load_directly out, and give the optimizer its groups with what is returned"
        )
    if load_directly:
        optim.load_state_dict(loaded)
    return loaded


def check_group(model: nn.Module, group: Any) -> None:
    """Make sure that `group`, if one is given, are the ranks that `model` is sharded over.

    Raises:
        ValueError: if they are others.
    """
    if group is None:
        return
    given = resolve_topology(group).shard
    for place in places_in(model):
        topology = place.unit.topology
        sizes = [each.size for each in (topology.shard, topology.replicate) if each is not None]
        if given.size not in {*sizes, topology.data_parallel_size}:
            raise ValueError(
                f"group: expected the ranks that the model is sharded over, {topology.shard}, found {given}"
            )
