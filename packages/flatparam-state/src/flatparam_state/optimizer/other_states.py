"""Whether saved states are those of a different optimizer than the one that they are loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flatparam_runtime import FlatParamError
from flatparam_state.optimizer.first_state import names_of_first_state
from flatparam_state.optimizer.holdings import Holding
from flatparam_state.optimizer.quantised import spread_out

__all__ = ["check_states"]


def check_states(
    optimizer: torch.optim.Optimizer, holding: Holding, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse saved states that the optimizer cannot go on with, such as those of AdamW for SGD with momentum.

    An optimizer of torch needs the states that its first step makes, and may be given more. Of any other nothing is
    known before its first step; then it may lack states that come later, or have them, but not both. A parameter that
    was saved without states is one that was never stepped.

    Raises:
        FlatParamError: naming the parameter, the states that were found and those that were expected.
    """
    known: dict[tuple[int, int, torch.dtype], frozenset[str]] = {}
    for number, (settings, items) in enumerate(holding.groups):
        for item in items:
            kind = number, item.parameter.dim(), item.parameter.dtype
            if kind not in known:
                known[kind] = names_of_first_state(optimizer, settings, item.parameter)
            needed = known[kind]
            held = frozenset(spread_out(optimizer.state.get(item.parameter) or {}))
            for fqn in item.fqns:
                found = frozenset(name for name, value in saved.get(fqn, {}).items() if value is not None)
                if found and (needed - found or (not needed and held - found and found - held)):
                    raise FlatParamError(
                        f"optimizer state of {fqn!r}: expected {_listed(needed or held)}, which "
                        f"{type(optimizer).__name__} has, found {_listed(found)}: it is the state of a different "
                        "optimizer, or of different settings; make the optimizer that was saved, or load "
                        "with other_states=True"
                    )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
