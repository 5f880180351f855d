"""The module inside a wrapper, which the wrapper stands for: it is called, and indexed, through the wrapper."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

import flatparam_runtime as runtime
from flatparam_core import FSDP_WRAPPED_MODULE

__all__ = ["forward", "item_of", "module_of"]


@partial(runtime.untraced, with_callees=False)
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the wrapped module, with its full parameters in place."""
    return runtime.call_unit(vars(self)["_interior"].unit, _inside(self), args, kwargs)


def module_of(self: nn.Module) -> nn.Module:
    """The wrapped module, without an activation-checkpointing wrapper around it."""
    inner = _inside(self)
    checkpointed = inner._modules.get("_checkpoint_wrapped_module")
    return inner if checkpointed is None else checkpointed


def item_of(self: nn.Module, key: Any) -> Any:
    """Index the wrapped module."""
    # The user says that the module can be indexed.
    return module_of(self)[key]  # type: ignore[index]


def _inside(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules[FSDP_WRAPPED_MODULE]
    assert inner is not None, "the wrapper always has its module"
    return inner
