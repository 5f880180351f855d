"""A watcher of a program in hollow memory: it notes kernels, units and collectives."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from torch import nn

from flatparam_plan.counting import Counting, states_of
from flatparam_plan.hollow import HollowMemory
from flatparam_plan.hollow.kernels import operands_of
from flatparam_plan.rehearsal.rehearsal import Entry
from flatparam_plan.training import Call, Trained
from flatparam_runtime import Event, Unit, observe, tree_of, units_in

__all__ = ["Observer"]

OUTSIDE = ""
"""The name of no unit."""


@attrs.define(eq=False)
class Observer(Counting):
    """A watcher that also notes kernels, units and collectives."""

    memory: HollowMemory = attrs.field(kw_only=True)
    is_ahead: bool = attrs.field(kw_only=True)
    """Whether the schedule is that of an accelerator."""
    entries: list[Entry] = attrs.field(factory=list)
    kernels: array[int] = attrs.field(factory=lambda: array("l"))
    _running: list[str] = attrs.field(factory=list)
    """The units whose forward calls are running, the innermost last."""
    _backward_of: str = OUTSIDE
    _now: tuple[str, int] = ("building", 0)
    _moving: bool = False
    _open: int | None = None
    _open_unit: str = OUTSIDE
    _modules: dict[nn.Module, Unit] = attrs.field(factory=dict)
    stack: ExitStack = attrs.field(factory=ExitStack)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """See `Watcher.stage`."""
        self._now = (name, step)
        self.memory.log.tag = name
        self._backward_of = OUTSIDE
        self._note("stage")
        with super().stage(name, step):
            yield
            if self.trained is not None:
                self._sort_out(name, self.trained)
        self._close()
        self.memory.log.tag = "other"

    def _sort_out(self, name: str, trained: Trained) -> None:
        """Say what the memory is for that stays after a stage."""
        if name == "backward":
            self.memory.tag((each.grad for each in trained.model.parameters()), "gradients")
        elif name == "optimizer":
            self.memory.tag(states_of(trained.optimizer), "optimizer states")

    def made(self, trained: Trained) -> None:
        """See `Watcher.made`."""
        super().made(trained)
        self.memory.tag(trained.model.parameters(), "parameters")
        self.memory.tag(trained.model.buffers(), "buffers")
        self._modules = {unit.module: unit for unit in units_in(trained.model)}
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enters)
        after = hooks.register_module_forward_hook(self._leaves, always_call=True)
        self.stack.callback(before.remove)
        self.stack.callback(after.remove)
        self.stack.enter_context(observe(trained.model, self))

    def _enters(self, module: nn.Module, args: Any) -> None:
        if module in self._modules:
            self._close()
            self._running.append(self._modules[module].name)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._modules and self._running:
            self._close()
            name = self._running.pop()
            # A unit that stays gathered says nothing when its backward begins.
            for tensor in operands_of([*output.values()] if isinstance(output, Mapping) else output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self._begins_backward(name))

    def _begins_backward(self, name: str) -> None:
        """Note that what is computed from here on is the backward of this unit, unless it is inside a forward call."""
        if self._now[0] == "backward" and self._backward_of != name:
            self._close()
            self._backward_of = name

    @property
    def unit(self) -> str:
        """The unit that computes now."""
        return self._running[-1] if self._running else self._backward_of

    def on_event(self, event: Event) -> None:
        """See `Instrument.on_event`."""
        if self.is_ahead:
            # An accelerator's own allocator keeps memory, which counts as free.
            tree_of(next(iter(self._modules.values()))).pool.keeps = False
        if event.kind == "use" and self._now[0] == "backward":
            self._begins_backward(event.unit)
        self._note(event.kind, unit=event.unit, nbytes=event.nbytes)

    def on_call(self, what: str, call: Call) -> None:
        """Note a collective; the work of `LoneRank` itself is none of the program's."""
        self._moving = what == "issued"
        if what != "moved":
            self._note(what, unit=call.label, nbytes=call.nbytes, call=call)

    def on_kernel(self, number: int) -> None:
        """Note a kernel."""
        if self._moving:
            return
        if self._open is not None and self._open_unit != self.unit:
            self._close()
        if self._open is None:
            self._open, self._open_unit = len(self.kernels), self.unit
        self.kernels.append(number)

    def _close(self) -> None:
        """End the run of kernels that one unit computes."""
        if self._open is not None:
            stage, step = self._now
            start, self._open = self._open, None
            entry = Entry("kernels", stage, step, self._open_unit, self.place(), start, len(self.kernels))
            self.entries.append(entry)

    def _note(self, kind: str, *, unit: str = OUTSIDE, nbytes: int = 0, call: Call | None = None) -> None:
        self._close()
        stage, step = self._now
        self.entries.append(Entry(kind, stage, step, unit, self.place(), nbytes=nbytes, call=call))
