"""From a layout policy to the rule of each parameter, looked up for the whole tree before anything is sharded."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import MutableMapping
from typing import Any, final

import attrs
from torch import nn

from flatparam.layout import as_policy
from flatparam_core import (
    ELEMENT,
    BoundParameter,
    FlatParameter,
    LayoutRule,
    ParamSpec,
    clean_fqn,
    owner_of,
)
from flatparam_runtime import warn_caller

__all__ = ["ResolvedRules", "resolve_rules"]


@final
@attrs.frozen(eq=False)
class ResolvedRules:
    """The rule of every parameter of a model, by the attribute that holds it: the object may be replaced by another."""

    _by_module: MutableMapping[nn.Module, dict[str, LayoutRule]]
    shares: tuple[float, ...] = ()
    """For each rank of the shard group the weight of its part; empty gives all the same."""

    def __call__(self, bound: BoundParameter) -> LayoutRule:
        """Return the rule of a parameter; of a shared one, that which keeps most together."""
        known = (self._by_module.get(info.module, {}).get(info.param_name, ELEMENT) for info in bound.infos)
        spec = bound.spec
        return max(known, key=lambda rule: _strictness(rule, spec))


def _strictness(rule: LayoutRule, spec: ParamSpec) -> tuple[int, int]:
    return rule.grain(spec.shape, spec.stride), rule.block_numel


def resolve_rules(module: nn.Module, layout: Any, *, is_whole_model: bool = False) -> ResolvedRules | None:
    """The rules that `layout` gives the parameters below `module` that no unit holds yet; `None` without a layout.

    Args:
        is_whole_model: `layout` is for this module alone; a pattern that fits none of its names gets a warning.

    Raises:
        TypeError: for anything that is no layout, or gives no rule; the message names the parameter.
    """
    if layout is None:
        return None
    policy = as_policy(layout)
    found: MutableMapping[nn.Module, dict[str, LayoutRule]] = weakref.WeakKeyDictionary()
    names: list[str] = []
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is None or isinstance(parameter, FlatParameter) or owner_of(parameter) is not None:
                # A pattern may be for this one.
                is_whole_model = is_whole_model and parameter is None
                continue
            fqn = clean_fqn(f"{path}.{name}" if path else name)
            found.setdefault(child, {})[name] = policy.rule(fqn, parameter, child)
            names.append(fqn)
    for pattern in policy.patterns if is_whole_model else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            shown = f"{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}" or "none"
            warn_caller(
                f"layout: {pattern!r} fits no parameter, so its rule does nothing; the names are {shown}",
            )
    return ResolvedRules(found, policy.shares)
