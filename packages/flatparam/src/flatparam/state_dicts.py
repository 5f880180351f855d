"""Which form `state_dict()` has, and the hooks through which torch's own machinery saves and loads it."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn
from typing_extensions import final

from flatparam.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from flatparam.compat import as_config, as_enum
from flatparam.errors import NotYetSupportedError
from flatparam_core import FSDP_WRAPPED_MODULE, clean_fqn
from flatparam_runtime import inside, unit_of
from flatparam_state import FullLoad, clean_keys, full_state_shown, places_of

__all__ = ["Loading", "default_settings", "resolve_settings", "saving"]


def default_settings() -> StateDictSettings:
    """Full tensors on every rank, where they are."""
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=True)
    )


def resolve_settings(
    state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """The settings asked for.

    Raises:
        NotYetSupportedError: for a form that this version has not.
        RuntimeError: where a configuration is not one of the form's.
    """
    kind = as_enum(StateDictType, state_dict_type, "state_dict_type")
    if kind is not StateDictType.FULL_STATE_DICT:
        raise NotYetSupportedError(f"state_dict_type={kind}", "use StateDictType.FULL_STATE_DICT")
    settings = default_settings()
    try:
        if state_dict_config is not None:
            settings.state_dict_config = as_config(
                FullStateDictConfig, state_dict_config, "state_dict_config"
            )
        if optim_state_dict_config is not None:
            settings.optim_state_dict_config = as_config(
                FullOptimStateDictConfig, optim_state_dict_config, "optim_state_dict_config"
            )
    except TypeError as error:
        raise RuntimeError(f"{kind.name} does not take this configuration: {error}") from error
    return settings


def wants(config: StateDictConfig | OptimStateDictConfig) -> dict[str, bool]:
    """The two questions that every full form answers, as arguments."""
    return {"offload_to_cpu": config.offload_to_cpu, "rank0_only": bool(getattr(config, "rank0_only", False))}


@contextlib.contextmanager
def saving(
    wrapper: nn.Module, settings: StateDictSettings, state: dict[str, Any], prefix: str
) -> Iterator[None]:
    """While torch collects `wrapper`'s state in `state`, show full parameters; then clean the names it wrote."""
    config = settings.state_dict_config
    with full_state_shown(wrapper, **wants(config)):
        yield
    clean_keys(state, prefix)
    inner = wrapper._modules[FSDP_WRAPPED_MODULE]
    unit = None if inner is None else unit_of(inner)
    for name, dtype in unit.buffers.original_dtypes.items() if unit is not None else ():
        if prefix + name in state:
            state[prefix + name] = state[prefix + name].to(dtype)
    if config.offload_to_cpu:
        for key in [key for key in state if key.startswith(prefix)]:
            if hasattr(state[key], "cpu"):
                state[key] = state[key].cpu()


_LOCAL = threading.local()


@final
@attrs.define(eq=False)
class Loading:
    """The hooks around torch's loading of one wrapper.

    Each wrapper takes the entries of its own unit. The outermost one of a loading copies for all of them at its end,
    and only where everything fits.
    """

    _current: FullLoad | None = None
    _errors: list[str] | None = None
    """The list in which torch collects the errors of one loading: the same for every module in it."""
    _inside: list[FullLoad] = attrs.field(factory=list)

    def before(
        self,
        wrapper: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Watch for the unit's parameters, and give the entries the names that torch expects inside the wrapper."""
        if self._current is not None:
            self._current.close()  # an exception ended the loading before
        outermost: Loading | None = getattr(_LOCAL, "outermost", None)
        if outermost is None or outermost._errors is not errors:
            outermost = _LOCAL.outermost = self
            self._inside.clear()
        inner = wrapper._modules[FSDP_WRAPPED_MODULE]
        assert inner is not None, "the wrapper always has its module"
        unit = unit_of(inner)
        places = () if unit is None else places_of(unit)
        self._current = FullLoad.begin(places, {inner, *inside(inner)})
        self._errors = errors
        outermost._inside.append(self._current)
        below = f"{prefix}{FSDP_WRAPPED_MODULE}."
        for key in [key for key in state if key.startswith(prefix) and not key.startswith(below)]:
            state[below + key[len(prefix) :]] = state.pop(key)

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Copy to the shards; the names in torch's report become the user's."""
        current, self._current = self._current, None
        if current is None or self._errors is None:
            return
        current.stop()  # the wrapper may be reached by another path too
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        missing[:] = map(clean_fqn, current.really_missing(missing))
        unexpected[:] = map(clean_fqn, unexpected)
        self._errors[:] = [error.replace(f"{FSDP_WRAPPED_MODULE}.", "") for error in self._errors]
        if getattr(_LOCAL, "outermost", None) is self:
            if not any(loading.refused for loading in self._inside):
                for loading in self._inside:
                    loading.commit()
            for loading in self._inside:
                loading.close()
            self._inside.clear()
            _LOCAL.outermost = None


def with_inner_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of `state` that tells the modules inside `wrapper` their saved versions.

    Torch looks a module's version up under the module's name, which inside the wrapper is another than in the state.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return state
    copied: Any = OrderedDict(state)
    copied._metadata = OrderedDict(metadata)
    for name, _ in wrapper.named_modules(remove_duplicate=False):
        if clean_fqn(name) in metadata:
            copied._metadata[name] = metadata[clean_fqn(name)]
    result: Mapping[str, Any] = copied
    return result
