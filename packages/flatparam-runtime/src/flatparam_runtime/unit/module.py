"""The module of a unit: its calls and those of modules inside it, its buffers, its initial weights, its leaves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import final

import attrs
from torch import nn

from flatparam_comm import FlatParamError, FlatParamHandle, FullForm
from flatparam_runtime.unit.buffers import UnitBuffers
from flatparam_runtime.unit.calls import ForwardCall
from flatparam_runtime.unit.initial_weights import InitialWeights
from flatparam_runtime.unit.inner_calls import InnerCalls
from flatparam_runtime.unit.leaves import LeafWatch

__all__ = ["UnitModule"]


@final
@attrs.define(eq=False)
class UnitModule:
    """The module whose forward pass needs a unit's parameters, held weakly."""

    reference: weakref.ReferenceType[nn.Module]
    buffers: UnitBuffers = attrs.field(factory=UnitBuffers)
    initial: InitialWeights | None = None
    """The checksums of the initial weights, until the ranks have compared them."""
    inner: InnerCalls = attrs.field(factory=InnerCalls)
    """The stand-ins in the modules inside, in place while the module itself is not called."""
    calls: list[ForwardCall] = attrs.field(factory=list)
    """The module's running forward calls, the innermost last."""
    watches: dict[FullForm, LeafWatch] = attrs.field(factory=dict)
    """The watches over the leaves that the module has shown."""

    def get(self, unit: str) -> nn.Module:
        """The module.

        Raises:
            FlatParamError: if it does not exist any more; the message names `unit`.
        """
        module = self.reference()
        if module is None:
            raise FlatParamError(
                f"the module of unit {unit!r} does not exist any more: keep a reference to the model until its "
                "backward pass is over"
            )
        return module

    def watch(self, form: FullForm, watch: LeafWatch, handles: Iterable[FlatParamHandle]) -> None:
        """Keep the watch over the leaves of `form`, and forget those of forms that none of `handles` has any more."""
        known = {each for handle in handles for each in handle.forms.known}
        self.watches = {each: kept for each, kept in self.watches.items() if each in known} | {form: watch}

    def watched(self, handles: Iterable[FlatParamHandle]) -> Iterator[tuple[int, FlatParamHandle, LeafWatch]]:
        """Those of `handles` whose present leaves are watched: the number, the handle, and the watch."""
        for number, handle in enumerate(handles):
            watch = self.watches.get(handle.form)
            if watch is not None:
                yield number, handle, watch

    def begin_call(self, call: ForwardCall) -> None:
        """Add a forward call that begins."""
        if not self.calls:
            self.inner.lift()
        self.calls.append(call)

    def end_call(self) -> ForwardCall:
        """Remove the innermost forward call, which is over, and return it."""
        call = self.calls.pop()
        if not self.calls:
            self.inner.put()
        return call

    def forget_calls(self) -> None:
        """Remove every call, after an exception has interrupted them."""
        self.calls.clear()
        self.inner.put()

    def look_after(self, buffers: UnitBuffers, initial: InitialWeights | None, inner: InnerCalls) -> None:
        """Take the buffers to cast, the initial weights to compare, and the calls inside to watch."""
        self.buffers, self.initial, self.inner = buffers, initial, inner

    def forget_initial(self) -> None:
        """Drop the checksums of the initial weights: the ranks have compared them."""
        self.initial = None
