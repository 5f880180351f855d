"""The settings of `state_dict_type`, which say which form the state of wrappers has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from flatparam.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from flatparam.compat import as_config, as_enum
from flatparam.sharding.extensions import chunker
from flatparam.wrapper.interior import wrappers_in
from flatparam_runtime import Unit, warn_caller
from flatparam_state import FormKind, StateForm
from flatparam_state.forms.chunker import OWN_CHUNKER

_CONFIGS: Final = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_KINDS: Final = {
    StateDictType.FULL_STATE_DICT: FormKind.FULL,
    StateDictType.LOCAL_STATE_DICT: FormKind.LOCAL,
    StateDictType.SHARDED_STATE_DICT: FormKind.SHARDED,
}

chunks_by_default = False
"""Whether a `ShardedTensor` has FSDP1's chunks if a configuration does not say; `install` sets it."""


def default_settings() -> StateDictSettings:
    """Return the settings of a new wrapper: full tensors on every rank, on the device that they are on."""
    return resolve_settings(StateDictType.FULL_STATE_DICT)


def no_settings() -> StateDictSettings:
    """Return the settings that FSDP1 tells of a module without wrappers."""
    nothing: Any = None
    return StateDictSettings(nothing, nothing, nothing)


def _kinds_of(settings: StateDictSettings) -> tuple[StateDictType, type, type]:
    """Return the settings without the fields of their configurations, in which wrappers of one form may differ."""
    return (settings.state_dict_type, type(settings.state_dict_config), type(settings.optim_state_dict_config))


def resolve_settings(
    state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """Return the settings that were asked for, checked and with their defaults.

    Raises:
        RuntimeError: if a configuration is not one of the form's.
    """
    kind = as_enum(StateDictType, state_dict_type, "state_dict_type")
    of_model, of_optimizer = _CONFIGS[kind]
    try:
        return StateDictSettings(
            kind,
            of_model() if state_dict_config is None else as_config(of_model, state_dict_config, "state_dict_config"),
            of_optimizer()
            if optim_state_dict_config is None
            else as_config(of_optimizer, optim_state_dict_config, "optim_state_dict_config"),
        )
    except TypeError as error:
        raise RuntimeError(f"{kind.name} does not take this configuration: {error}") from error


def form_of(kind: StateDictType, config: StateDictConfig | OptimStateDictConfig) -> StateForm:
    """The form of model or optimizer state that the settings ask for; extensions cut sharded tensors as FSDP1's do."""
    cutting = chunker()
    chunks = True if cutting is not OWN_CHUNKER else getattr(config, "dim_0_chunks", None)
    return StateForm(
        _KINDS[kind],
        offload_to_cpu=config.offload_to_cpu,
        rank0_only=bool(getattr(config, "rank0_only", False)),
        dim_0_chunks=chunks_by_default if chunks is None else chunks,
        use_dtensor=bool(getattr(config, "_use_dtensor", False)),
        chunker=cutting,
        # No form serves both: torchsnapshot divides by a part's size in the first dimension, and then by the bytes of
        # one of its rows, of which an empty part has a zero; without a part torch's planners forget the tensor.
        empty_parts="torchsnapshot" not in sys.modules,
    )


def set_settings(
    module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """Choose the form of the state of every wrapper in `module`; see `set_state_dict_type` of the wrapper.

    Raises:
        RuntimeError: if a configuration is not one of the form's.
        AssertionError: if the forms before differ, so that one call could not set them again.
    """
    settings = resolve_settings(state_dict_type, state_dict_config, optim_state_dict_config)
    interiors = wrappers_in(module).values()
    before = [interior.settings for interior in interiors]
    assert len({_kinds_of(each) for each in before}) <= 1, "the wrappers in this module have different state dict types"
    for interior in interiors:
        interior.settings = settings
    return before[0] if before else no_settings()


def settings_of(module: nn.Module) -> StateDictSettings | None:
    """Return the settings of the wrappers in `module`, which must agree; `None` if there are none.

    Raises:
        AssertionError: if they differ.
    """
    settings = [interior.settings for interior in wrappers_in(module).values()]
    assert all(s == settings[0] for s in settings), "the wrappers in this module have different state dict types"
    return settings[0] if settings else None


@contextlib.contextmanager
def settings_shown(
    module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Iterator[None]:
    """Choose the form of the state inside the context; also an exception restores the settings before."""
    interiors = wrappers_in(module).values()
    before = [interior.settings for interior in interiors]
    set_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for interior, settings in zip(interiors, before, strict=True):
            interior.settings = settings


def check_form(unit: Unit, kind: StateDictType) -> None:
    """Make sure that the form is possible for the unit, by FSDP1's rules.

    Raises:
        RuntimeError: for a local state of what was sharded over a mesh.
    """
    if kind is StateDictType.FULL_STATE_DICT:
        return
    if unit.topology.shard.size == 1:
        warn_caller(f"unit {unit.name!r} shards nothing (NO_SHARD), so its full state is returned for {kind.name}")
    elif kind is StateDictType.LOCAL_STATE_DICT and unit.topology.mesh is not None:
        raise RuntimeError(
            f"unit {unit.name!r} was sharded over a DeviceMesh, which is not compatible with LOCAL_STATE_DICT; use "
            "SHARDED_STATE_DICT, which then has DTensors"
        )
