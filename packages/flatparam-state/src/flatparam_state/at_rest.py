"""A model at rest: each rank has its shards, nobody uses full parameters, and, if asked for, no optimizer steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from flatparam_runtime import FlatParamError, Phase, refuse_in_a_pass, units_in

__all__ = ["bring_to_rest", "allow_steps", "refuse_steps"]


def bring_to_rest(model: nn.Module) -> None:
    """Free the full parameters of `model`, none of whose units may be in use.

    Raises:
        FlatParamError: inside a forward or backward pass, or inside `summon_full_params`.
    """
    for unit in units_in(model):
        refuse_in_a_pass(unit)
        if unit.showing.pins or unit.phase is Phase.INSPECTING:
            raise FlatParamError(
                f"unit {unit.name!r}: its shards are not saved, loaded, published or moved while full parameters are "
                "summoned; leave summon_full_params() first"
            )
        unit.reshard()
        unit.take_over()


# Optimizers that may not step now, because a model shows something other than what they are to change


_REASONS: Final[Any] = WeakIdKeyDictionary()
"""For each parameter, why an optimizer that holds it may not step: the latest reason last."""


def refuse_steps(parameters: Iterable[torch.Tensor], reason: str) -> None:
    """Refuse each step of an optimizer that holds one of `parameters`, with an error that gives the `reason`."""
    _look_before_steps()
    for parameter in parameters:
        _REASONS[parameter] = (*_REASONS.get(parameter, ()), reason)


def allow_steps(parameters: Iterable[torch.Tensor], reason: str) -> None:
    """Undo one `refuse_steps` with this `reason`, as far as there was one."""
    for parameter in parameters:
        left = list(_REASONS.pop(parameter, ()))
        if reason in left:
            left.remove(reason)
        if left:
            _REASONS[parameter] = tuple(left)


@functools.cache
def _look_before_steps() -> None:
    """Have each optimizer in the process looked at when it steps; a second call does nothing."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not len(_REASONS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reasons = _REASONS.get(parameter)
            if reasons:
                raise FlatParamError(f"{type(optimizer).__name__}.step(): {reasons[-1]}")
