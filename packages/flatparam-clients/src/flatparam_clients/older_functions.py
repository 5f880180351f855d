"""FSDP1's older functions for optimizer state, which `optim_state_dict` and `optim_state_dict_to_load` replaced.

Each is a static method of `FullyShardedDataParallel`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from flatparam.api import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from flatparam.resolving.arguments import Ranks
from flatparam.state.optimizer import check_group, to_load
from flatparam.state.settings import form_of, settings_of
from flatparam_clients.rekeying import given_optimizer, warn_of_input
from flatparam_state import optimizer_state_dict

__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]

F = TypeVar("F", bound=Callable[..., Any])


def _legacy(instead: str) -> Callable[[F], F]:
    """Say at each call what replaced the method."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def warned(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(
                f"FullyShardedDataParallel.{method.__name__}() is an older method: use {instead}() instead",
                FutureWarning,
                stacklevel=2,
            )
            return method(*args, **kwargs)

        # The signature is the same.
        return warned  # type: ignore[return-value]

    return decorate


@_legacy("optim_state_dict")
def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Ranks | None = None,
) -> dict[str, Any]:
    """Return the full optimizer state by parameter name, in CPU memory; with `rank0_only` only on the first rank.

    `optim_input` is not needed any more: what the optimizer holds is asked of `optim`.
    """
    warn_of_input(optim_input)
    check_group(model, group)
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    return optimizer_state_dict(model, optim, form=form_of(StateDictType.FULL_STATE_DICT, config))


@_legacy("optim_state_dict")
def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: Ranks | None = None
) -> dict[str, Any]:
    """Return the sharded optimizer state by parameter name, as the settings for sharded states say."""
    check_group(model, group)
    settings = settings_of(model)
    config = settings.optim_state_dict_config if settings is not None else None
    if not isinstance(config, ShardedOptimStateDictConfig):
        config = ShardedOptimStateDictConfig()
    form = form_of(StateDictType.SHARDED_STATE_DICT, config)
    return optimizer_state_dict(model, optim, form=form, first_state=True)


@_legacy("optim_state_dict_to_load")
def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a full state, which every rank passes, for `optim.load_state_dict`."""
    return to_load(model, given_optimizer(model, optim_input, optim), full_optim_state_dict)


@_legacy("optim_state_dict_to_load")
def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
    group: Ranks | None = None,
) -> dict[str, Any]:
    """Return this rank's part of the first rank's full state; what the other ranks pass is not looked at."""
    check_group(model, group)
    optimizer = given_optimizer(model, optim_input, optim)
    return to_load(model, optimizer, full_optim_state_dict, rank0_only=True)


@_legacy("optim_state_dict_to_load")
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return this rank's part of a sharded state, for `optim.load_state_dict`."""
    return to_load(model, optim, sharded_optim_state_dict)
