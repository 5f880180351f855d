"""Wrap the submodules that a policy chooses, or nothing at all."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatparam.resolve import Ignored, resolve
from flatparam.wrap import chosen_by, wrap_chosen
from flatparam_core import FlatParamError

__all__ = ["wrap_below"]


def wrap_below(
    wrapper: type[nn.Module],
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    arguments: dict[str, Any],
) -> None:
    """Wrap what `policy` chooses inside `module`; everything is checked before anything is wrapped.

    Args:
        wrapper: the class to wrap with.
        arguments: the constructor's, for every module that is wrapped.

    Raises:
        ValueError: where something inside is wrapped already.
        FlatParamError: where two of the units to be would hold one parameter.
    """
    for name, child in module.named_modules():
        if isinstance(child, wrapper):
            raise ValueError(
                f"auto_wrap_policy: {name or 'the module'!r} is wrapped already; wrap by hand or by a policy, not both"
            )
    targets = chosen_by(
        policy,
        module,
        ignored_modules=ignored.modules,
        ignored_parameters=ignored.parameters,
        kwargs=arguments,
    )
    for child, kwargs in targets.items():
        resolve(child, **kwargs)
    _refuse_ties(module, set(targets), ignored)
    wrap_chosen(module, targets, wrapper)


def _refuse_ties(root: nn.Module, targets: set[nn.Module], ignored: Ignored) -> None:
    """Check that each parameter is reached from one future unit only."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    stack = [("", root, root)]
    while stack:
        prefix, module, above = stack.pop()
        owner = module if module in targets else above
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            other, first = owners.setdefault(id(parameter), (owner, prefix + name))
            if other is not owner:
                raise FlatParamError(
                    f"parameter {prefix + name!r} is the same as {first!r}, which another unit would "
                    "hold; make one unit of "
                    "a module that contains both, or ignore one"
                )
        children = [
            (f"{prefix}{name}.", child, owner) for name, child in module._modules.items() if child is not None
        ]
        stack.extend(reversed(children))
