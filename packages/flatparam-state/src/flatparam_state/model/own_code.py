"""Code of a model's own that runs while its state is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import nn

__all__ = ["has_own_code"]

_OURS: Final = frozenset(
    {"flatparam", "flatparam_state", "flatparam_runtime", "flatparam_comm", "flatparam_core"}
)
_READS_STATE_ONLY: Final = _OURS | {"torch", "bitsandbytes", "peft"}
"""The packages whose code does not look at the parameters of the module that is loaded."""


def has_own_code(module: nn.Module) -> bool:
    """Whether `module` may look at its parameters while it is loaded: it has hooks, or its own way to load itself."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    functions = [module._load_from_state_dict, *(getattr(hook, "hook", hook) for hook in hooks)]
    return not all(map(_is_known, functions))


def _is_known(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    home: str = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] in _READS_STATE_ONLY
