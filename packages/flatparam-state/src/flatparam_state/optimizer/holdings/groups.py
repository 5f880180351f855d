"""The parameter groups of an optimizer's state, with the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatparam_runtime import FlatParamError
from flatparam_state.optimizer.entries import State, is_equal
from flatparam_state.optimizer.holdings.held import Held, Holding

__all__ = ["complete_groups", "named_group", "settings_of", "with_settings"]


def complete_groups(groups: Sequence[dict[str, Any]], held: Mapping[str, int]) -> None:
    """Add the names in `held` that no group has, since only other ranks hold elements of them, to their groups."""
    known = {name for group in groups for name in group["params"]}
    for fqn, number in held.items():
        if fqn not in known and number < len(groups):
            for key in {"params", "param_names"} & groups[number].keys():
                groups[number][key].append(fqn)


def named_group(group: Mapping[str, Any], holding: Holding) -> dict[str, Any]:
    """Return the group with the names of parameters, also if the optimizer was made from named parameters."""
    meant = holding.resolve(group["params"])
    fqns = [fqn for key in group["params"] for fqn in meant[key].fqns]
    return {**group, **{key: list(fqns) for key in ("params", "param_names") if key in group}}


_NAMES = frozenset({"params", "param_names"})
"""The entries of a group that name its parameters; the others are settings."""


def with_settings(item: Held, saved: State, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `item` that the saved groups must have; one that no unit holds may have been in no optimizer."""
    known = {name for group in groups for name in group["params"]} | saved.keys()
    return [fqn for fqn in item.fqns if item.place is not None or fqn in known]


def settings_of(names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that the saved groups give to the parameters `names`, which must be the same for all."""
    if not names:
        return {}
    home = {name: group for group in groups for name in group["params"]}
    for name in names:
        if name not in home:
            raise FlatParamError(
                f"no parameter group of the saved optimizer state holds {name!r}; it was saved from "
                "a different model, or the optimizer then did not hold this parameter"
            )
    first = {key: value for key, value in home[names[0]].items() if key not in _NAMES}
    for name in names[1:]:
        other = home[name]
        # In this order, so that every rank names the same setting.
        for key in sorted(first.keys() | (other.keys() - _NAMES)):
            if not is_equal(first.get(key), other.get(key)):
                raise FlatParamError(
                    f"the saved optimizer state has {key}={first.get(key)!r} for {names[0]!r} and "
                    f"{other.get(key)!r} for {name!r}, which are in one parameter group now; give the optimizer the "
                    "groups that it had, with use_orig_params=True if a flat parameter joins them"
                )
    return first
