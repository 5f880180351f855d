"""FSDP1's older functions for optimizer state, which `optim_state_dict` and `optim_state_dict_to_load` replaced.

Each is a static method of `FullyShardedDataParallel`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from flatparam.api import FullOptimStateDictConfig, OptimStateKeyType, ShardedOptimStateDictConfig, StateDictType
from flatparam.compat import as_enum
from flatparam.resolving.arguments import Ranks
from flatparam.state.form_settings import form_of, settings_of
from flatparam.state.optimizer import check_group, to_load
from flatparam_core import FlatParamError
from flatparam_state import optimizer_state_dict
from flatparam_state.optimizer.held import Holding

__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "rekey_optim_state_dict",
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


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> Mapping[str, Any]:
    """Return a full optimizer state by name, with an ordinary optimizer's numbers as keys; or, of one by number, names.

    Args:
        model: the model whose parameters the optimizer holds, not sharded or with `use_orig_params=True`.
        optim_input: what the optimizer was made from; by default `model.parameters()`. Deprecated: pass `optim`.
        optim: the optimizer whose numbers they are.

    Raises:
        ValueError: if some keys are names and others are numbers.
        FlatParamError: if the optimizer holds flat parameters, or names do not fit. Every rank raises it.
    """
    wanted = as_enum(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
    kinds = {type(key) for key in optim_state_dict["state"]}
    if not kinds <= {str} and not kinds <= {int}:
        raise ValueError(
            "expected the keys of an optimizer state to be all names or all numbers, found "
            f"{sorted(map(repr, optim_state_dict['state']))}"
        )
    to_names = wanted is OptimStateKeyType.PARAM_NAME
    if not kinds or kinds == ({str} if to_names else {int}):
        return optim_state_dict
    names = _names(model, given_optimizer(model, optim_input, optim))
    new_keys: dict[Any, Any] = (
        dict(enumerate(names)) if to_names else {name: number for number, name in enumerate(names)}
    )
    return _rekeyed(optim_state_dict, new_keys)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    items = Holding.of(model, optimizer).items
    for item in items:
        if len(item.fqns) != 1:
            raise FlatParamError(
                f"the optimizer holds a flat parameter, of {item.fqns[0]!r} and others, which no one name stands for; "
                "pass the unsharded model and its optimizer, or shard with use_orig_params=True"
            )
    return [item.fqns[0] for item in items]


def _rekeyed(state: Mapping[str, Any], new_keys: Mapping[Any, Any]) -> dict[str, Any]:
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    for key in keys:
        if key not in new_keys:
            raise FlatParamError(
                f"the optimizer state has an entry for {key!r}, which the optimizer has no parameter for; it knows "
                f"{list(new_keys)[:5]} and so on, {len(new_keys)} in all"
            )
    return {
        "state": {new_keys[key]: values for key, values in state["state"].items()},
        "param_groups": [
            {**copy.deepcopy(dict(group)), "params": sorted(new_keys[key] for key in group["params"])}
            for group in state["param_groups"]
        ],
    }


def given_optimizer(
    model: nn.Module, optim_input: Iterable[Any] | None, optim: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Return the optimizer, or one that numbers its parameters in the same way."""
    warn_of_input(optim_input)
    if optim_input is None and optim is not None:
        return optim
    made_from = model.parameters() if optim_input is None else optim_input
    return torch.optim.Optimizer(made_from, {})


def warn_of_input(optim_input: object) -> None:
    """Say that `optim_input` is deprecated, if it is given; the warning names the line of the program."""
    if optim_input is not None:
        warnings.warn("optim_input is deprecated: pass optim instead", FutureWarning, stacklevel=4)
