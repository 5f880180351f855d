"""How the modules of a program are wrapped: a policy, or a short way to say one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

from flatparam.policies.policy import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from flatparam_plan.errors import PlanError
from flatparam_plan.training.modules import classes_named

__all__ = ["Wrapping", "policy_for"]

Wrapping: TypeAlias = Any
"""Names of classes, a least number of elements, a policy of `flatparam.wrap`, or `None` for one unit."""


def policy_for(wrap: Wrapping, model: nn.Module) -> Any:
    """The policy that chooses the units of `model`.

    Raises:
        PlanError: if it cannot be planned, or if the model has no module of a class that is named.
    """
    if getattr(wrap, "_plans", False):
        raise PlanError("wrap: planned() plans by itself while a model is wrapped; plan by --fit instead")
    if isinstance(wrap, str):
        wrap = (wrap,)
    if isinstance(wrap, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=wrap)
    if isinstance(wrap, Sequence):
        if all(isinstance(each, type) for each in wrap):
            return ModuleWrapPolicy(wrap)
        return CustomPolicy(_among(classes_named(model, wrap)))
    return wrap


def _among(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)
