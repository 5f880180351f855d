"""The forward calls of a unit's module, or of a module inside it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, final

import attrs
import torch
from torch import nn
from torch.autograd.graph import Node

Function = TypeVar("Function", bound=Callable[..., Any])


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
        returned: units of which the call has returned a parameter, or a part of its memory.
        lent: the units of which the call has read a parameter past their own calls, each with those who had its full
            parameters when they were lent.
        failed: the call raised.
        recorded: autograd was recording, when the call was over.
        watched: every output was found whose gradient may announce the unit's backward pass.
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
    lent: dict[Any, list[int]] = attrs.field(factory=dict)
    returned: set[Any] = attrs.field(factory=set)
    failed: bool = False
    recorded: bool = False
    watched: bool = False

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another thread is inside this call now."""
        return self.thread != threading.get_ident() and running_calls(self.module, self.thread) > 0


_CALLERS = {nn.Module._call_impl.__code__}
"""The code of the functions that call a module, which is their first argument; their frames tell of calls."""


def calls_module(function: Function) -> Function:
    """Have `running_calls` count the calls of `function`, whose first argument is the module that it calls."""
    _CALLERS.add(function.__code__)
    return function


def running_calls(module: nn.Module, thread: int | None = None) -> int:
    """Return the number of calls of `module` on the stack of this thread, or of `thread`."""
    count = 0
    frame: FrameType | None = sys._getframe() if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code in _CALLERS and frame.f_locals.get(frame.f_code.co_varnames[0]) is module:
            count += 1
        frame = frame.f_back
    return count
