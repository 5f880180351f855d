"""Which form `state_dict()` has, and the hooks through which torch's own machinery saves and loads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from flatparam_state import clean_keys, full_state_shown, hidden, load_full

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
    if config.offload_to_cpu:
        for key in [key for key in state if key.startswith(prefix)]:
            if hasattr(state[key], "cpu"):
                state[key] = state[key].cpu()


@final
@attrs.define(eq=False)
class Loading:
    """The hooks around torch's loading of one wrapper: what is sharded is taken out; later, names are cleaned."""

    _open: contextlib.ExitStack | None = None
    """What shows the sharded form again; it stays open only where an exception ended the loading."""

    def close(self) -> None:
        """Show the sharded form again."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

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
        """Load the sharded parameters from `state` and leave the rest to torch, under the names that it expects."""
        self.close()
        stack = contextlib.ExitStack()
        places = stack.enter_context(hidden(wrapper))
        self._open = stack
        absent: list[str] = []
        load_full(places, state, prefix, absent, errors)
        if strict:
            missing.extend(absent)
        inner = f"{prefix}{FSDP_WRAPPED_MODULE}."
        for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
            state[inner + key[len(prefix) :]] = state.pop(key)

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Show the sharded form again; the names in torch's report become the user's."""
        self.close()
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [clean_fqn(name) for name in names]
