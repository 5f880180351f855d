"""The keys of an optimizer state: names of parameters, or an ordinary optimizer's numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flatparam.api import OptimStateKeyType
from flatparam.compat import as_enum
from flatparam_core import FlatParamError
from flatparam_state import Holding

__all__ = ["given_optimizer", "rekey_optim_state_dict", "warn_of_input"]


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
