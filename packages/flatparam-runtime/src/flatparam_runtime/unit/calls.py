"""The forward calls of a unit's module, or of a module inside it."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, final

import attrs
import torch
from torch import nn
from torch.autograd.graph import Node

from flatparam_runtime.autograd import untraced

__all__ = ["ForwardCall", "call_between", "running_calls"]

Owner = TypeVar("Owner")


@final
@attrs.define(eq=False)
class ForwardCall:
    """One call of a unit's module.

    Attributes:
        outer_error: the exception that was being handled when the call began; a different one at its end is the call's.
        is_recomputation: activation checkpointing runs the forward again inside the unit's own backward.
        is_top: the call is the outermost of its pass.
        module: the unit's module, or a module inside it that was called by itself.
        full_precision: the call computes with the parameters in their own dtype.
        restored: the dtype that floating-point outputs are cast back to; `None` if they are not.
        stamp: the stamp of the unit's parameters with which the call computes.
        inputs: for each input tensor with a gradient, by a token: the graph node that its gradient arrives at, and its
            device.
        thread: the thread that makes the call.
    """

    outer_error: BaseException | None
    module: nn.Module
    is_recomputation: bool = False
    is_top: bool = False
    inputs: dict[object, tuple[Node, torch.device]] = attrs.field(factory=dict)
    stamp: int = 0
    full_precision: bool = False
    restored: torch.dtype | None = None
    thread: int = attrs.field(factory=threading.get_ident)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another thread is inside this call now."""
        return self.thread != threading.get_ident() and running_calls(self.module, self.thread) > 0


@functools.partial(untraced, with_callees=False)
def call_between(
    module: nn.Module,
    unit: Owner,
    before: Callable[[Owner, nn.Module, tuple[Any, ...], dict[str, Any]], Any],
    function: Callable[..., Any],
    after: Callable[[Owner, nn.Module, tuple[Any, ...], Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `function`, which is or calls `module`, between `before` and `after`, as torch calls `forward` between hooks.

    `after` is called with the output `None` if the call raises, whatever it raises.
    """
    try:
        args, kwargs = before(unit, module, args, kwargs)
        output = function(*args, **kwargs)
    except BaseException:
        try:
            after(unit, module, args, None)
        # As with torch's hooks: the first error is the one to propagate.
        except Exception as error:
            warnings.warn(f"this error follows from the one in the forward pass: {error}", stacklevel=2)
        raise
    changed = after(unit, module, args, output)
    return output if changed is None else changed


_CALLERS = (nn.Module._call_impl.__code__, call_between.__code__)
"""The code of the functions that call a module, which is their first argument; their frames tell of calls."""


def running_calls(module: nn.Module, thread: int | None = None) -> int:
    """The number of calls of `module` on the stack of this thread, or of `thread`."""
    count = 0
    frame: FrameType | None = sys._getframe() if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code in _CALLERS and frame.f_locals.get(frame.f_code.co_varnames[0]) is module:
            count += 1
        frame = frame.f_back
    return count
