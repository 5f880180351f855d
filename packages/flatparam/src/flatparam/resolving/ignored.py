"""The modules and parameters that are left whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import attrs
from torch import nn

from flatparam_core import FSDP_WRAPPED_MODULE, each_module
from flatparam_runtime import unit_of, warn_caller

__all__ = ["Ignored", "resolve_ignored"]


@final
@attrs.frozen(eq=False)
class Ignored:
    """The modules, with all below them, and the parameters that are left whole."""

    modules: frozenset[nn.Module] = frozenset()
    parameter_ids: frozenset[int] = frozenset()
    parameters: tuple[nn.Parameter, ...] = ()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.parameter_ids


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Resolve the two arguments, of which at most one may be given; units below an ignored module stay units.

    Raises:
        TypeError: for something that is no collection.
        ValueError: for both arguments, for something in one that is no module or parameter, for a mix of them, or for a
            module that is wrapped.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states exclude each other: pass one of them")
    name = "ignored_modules" if ignored_states is None else "ignored_states"
    items = list(_iterable(name, ignored_modules if ignored_states is None else ignored_states))
    if items and all(isinstance(item, nn.Parameter) for item in items) and name == "ignored_states":
        return _ignored((), items)
    if any(isinstance(item, nn.Parameter) for item in items) and any(isinstance(i, nn.Module) for i in items):
        raise ValueError("ignored_states: expected all modules or all parameters, found both")
    for item in items:
        if not isinstance(item, nn.Module):
            raise ValueError(f"{name}: expected an iterable of modules, found {type(item).__name__} in it")
        if FSDP_WRAPPED_MODULE in item._modules or unit_of(item) is not None:
            raise ValueError(
                f"{name} should not include wrapped modules, and this {type(item).__name__} is one"
            )
        if item is module:
            warn_caller(f"{name} holds the module that is wrapped: none of it is sharded")
    return _ignored(items, ())


def _iterable(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected an iterable, found {type(value).__name__}")
    return value


def _ignored(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Ignored:
    below = frozenset(
        child for module in modules for child in each_module(module, lambda child: unit_of(child) is not None)
    )
    every = (*parameters, *(p for module in below for p in module.parameters(recurse=False)))
    return Ignored(below, frozenset(map(id, every)), tuple(every))
