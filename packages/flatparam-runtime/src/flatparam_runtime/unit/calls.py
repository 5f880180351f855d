"""The forward calls of a unit's module, and calls of what is inside it that come from outside of its forward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar, final

import attrs
import torch
from torch import nn
from torch.autograd.graph import Node

from flatparam_runtime.autograd import CALL

Function = TypeVar("Function", bound=Callable[..., Any])


@final
@attrs.define(eq=False)
class ForwardCall:
    """One call of a unit's module.

    Attributes:
        outer_error: the exception that was being handled when the call began; a different one at its end is the call's.
        in_backward: the call is inside of a backward pass.
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
    in_backward: bool = False
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


U = TypeVar("U")


def _of_method(name: str) -> property:
    return property(lambda call: getattr(call.__wrapped__, name))


@final
class InnerCall(Generic[U]):
    """A stand-in for a method, as an attribute of the module: while it runs, the unit has its full parameters."""

    __slots__ = ("covered", "name", "own", "reference", "run", "unit")

    def __init__(self, unit: U, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        """A stand-in that `put` puts in its place.

        Args:
            unit: the unit that `module` is, or is inside of.
            name: the name of the method, or `CALL`.
            run: called with this object and the method's positional and keyword arguments.
        """
        self.unit = unit
        self.reference = weakref.ref(module)
        self.name = name
        self.run = run
        # The user's replacement for the class's method.
        self.own: Callable[..., Any] | None = None
        # The user's replacement for this object, which most likely calls it.
        self.covered: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _new, (), (self.unit, self.reference(), self.name, self.run, self.own, self.covered)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.unit, module, self.name, self.run, self.own, self.covered = state
        # That of a module which was taken out of the model refers to nothing.
        self.reference = weakref.ref(nn.Module() if module is None else module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.run(self, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The module that is called, and so alive."""
        module = self.reference()
        assert module is not None, "its own attribute is called"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself, whose signature this object has too."""
        if self.own is not None:
            return self.own
        name = "_call_impl" if self.name == CALL else self.name
        method: Callable[..., Any] = getattr(type(self.module), name).__get__(self.module)
        return method

    # What programs ask a method for that make a new one of its function. A `__getattr__` would make all else here slow.
    __closure__, __code__, __defaults__ = map(_of_method, ("__closure__", "__code__", "__defaults__"))
    __func__, __globals__, __kwdefaults__ = map(_of_method, ("__func__", "__globals__", "__kwdefaults__"))
    __name__, __self__ = map(_of_method, ("__name__", "__self__"))

    def put(self) -> None:
        """Replace the method; a function that the user has put over this object stays, and may call this object."""
        module = self.reference()
        if module is None:
            return
        there = beneath = module.__dict__.get(self.name)
        # A module may be in two units; that of the other one may be over this one.
        while isinstance(beneath, InnerCall) and beneath is not self:
            beneath = beneath.own
        if beneath is not self and (there is None or there is not self.covered):
            self.own, self.covered = there, None
            module.__dict__[self.name] = self

    def lift(self) -> None:
        """Restore the method, unless the user has put a function over this object."""
        module = self.reference()
        if module is None:
            return
        there = module.__dict__.get(self.name)
        if there is not self:
            # What `compile()` has put there does not call this object.
            self.covered = None if self.name == CALL else there
        elif self.own is not None:
            module.__dict__[self.name] = self.own
        else:
            del module.__dict__[self.name]


def _new() -> InnerCall[Any]:
    return InnerCall.__new__(InnerCall)
