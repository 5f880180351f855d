"""Wrap the submodules that a policy chooses, or nothing at all."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from flatparam.api import MixedPrecision
from flatparam.compat import as_config
from flatparam.environment import Environment
from flatparam.resolve import FULL_PRECISION, Arguments, Resolved, resolve
from flatparam.wrap import chosen_by, wrap_chosen
from flatparam_runtime import unit_of

__all__ = ["wrap_below"]


def wrap_below(wrapper: type[nn.Module], module: nn.Module, arguments: Arguments, resolved: Resolved) -> None:
    """Wrap what the policy chooses inside `module`; everything is checked before anything is wrapped.

    What is wrapped already stays as it is, and nothing inside it is wrapped again.

    Args:
        wrapper: the class to wrap with.
        arguments: the constructor's, for every module that is wrapped.
    """
    ignored = resolved.ignored
    wrapped = {
        child for child in module.modules() if isinstance(child, wrapper) or unit_of(child) is not None
    }
    inside = {child for outer in wrapped for child in outer.modules()}
    kwargs = arguments.below(resolved)
    targets = chosen_by(
        arguments.auto_wrap_policy,
        module,
        ignored_modules=ignored.modules | inside,
        ignored_parameters=ignored.parameters,
        kwargs=kwargs,
    )
    targets = {child: chosen for child, chosen in targets.items() if child not in inside}
    _keep_precision(module, targets, kwargs, ignored.modules | inside)
    environment = Environment.read()
    checked = {
        child: {**chosen, "ignored_states": resolve(child, Arguments(**chosen), environment)}
        for child, chosen in targets.items()
    }
    wrap_chosen(module, checked, wrapper)


def _keep_precision(
    module: nn.Module,
    targets: dict[nn.Module, dict[str, Any]],
    kwargs: dict[str, Any],
    left_out: frozenset[nn.Module] | set[nn.Module],
) -> None:
    """Make units that compute in fp32 of the classes that the mixed precision leaves out, as BatchNorm."""
    if kwargs["mixed_precision"] in (None, FULL_PRECISION):
        return
    classes = tuple(
        as_config(MixedPrecision, kwargs["mixed_precision"], "mixed_precision")._module_classes_to_ignore
    )
    found = [child for child in module.modules() if isinstance(child, classes) and child not in left_out]
    for child in found:
        if child is not module:
            targets[child] = {**targets.get(child, kwargs), "mixed_precision": FULL_PRECISION}
    if found:
        names = sorted({type(child).__name__ for child in found})
        warnings.warn(
            f"mixed_precision leaves {', '.join(names)} out: they become units of their own that compute in fp32",
            stacklevel=4,
        )
