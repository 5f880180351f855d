"""The module of a unit: its forward calls, and what of it is looked after between them."""

from __future__ import annotations

import weakref

import attrs
from torch import nn
from typing_extensions import final

from flatparam_comm import FlatParamError
from flatparam_runtime.unit.buffers import UnitBuffers
from flatparam_runtime.unit.calls import ForwardCall
from flatparam_runtime.unit.initial_weights import InitialWeights
from flatparam_runtime.unit.inner_calls import InnerCalls

__all__ = ["UnitModule"]


@final
@attrs.define(eq=False)
class UnitModule:
    """The module whose forward pass needs a unit's parameters, held weakly."""

    _reference: weakref.ReferenceType[nn.Module]
    buffers: UnitBuffers = attrs.field(factory=UnitBuffers)
    initial: InitialWeights | None = None
    """What it was made of, until the ranks have compared it."""
    inner: InnerCalls = attrs.field(factory=InnerCalls)
    """Of the modules inside it, while it is not called itself."""
    calls: list[ForwardCall] = attrs.field(factory=list)
    """Its forward calls under way, the innermost last."""

    def get(self, unit: str) -> nn.Module:
        """The module.

        Raises:
            FlatParamError: if it is gone, naming `unit`.
        """
        module = self._reference()
        if module is None:
            raise FlatParamError(
                f"the module of unit {unit!r} does not exist any more: keep a reference to the model until its "
                "backward pass is over"
            )
        return module

    def begin_call(self, call: ForwardCall) -> None:
        """A forward call begins."""
        if not self.calls:
            self.inner.lift()
        self.calls.append(call)

    def end_call(self) -> ForwardCall:
        """The innermost forward call is over."""
        call = self.calls.pop()
        if not self.calls:
            self.inner.put()
        return call

    def forget_calls(self) -> None:
        """An exception has ended every call."""
        self.calls.clear()
        self.inner.put()

    def look_after(self, buffers: UnitBuffers, initial: InitialWeights | None, inner: InnerCalls) -> None:
        """Have the buffers cast, the weights that it begins with compared, and the calls inside it watched."""
        self.buffers, self.initial, self.inner = buffers, initial, inner

    def forget_initial(self) -> None:
        """The ranks have compared the weights that it began with."""
        self.initial = None
