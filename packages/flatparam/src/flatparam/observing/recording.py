"""A trace of a running model: what each unit did and when, on the host's clock, as a trace for Perfetto."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import attrs
from torch import nn

from flatparam.observing.picture import Curve, Picture, Piece
from flatparam_runtime import Event, observe, units_in

__all__ = ["trace"]

COMPUTING: Final = "computing"
COMMUNICATION: Final = "communication"


@contextlib.contextmanager
def trace(model: nn.Module, path: str | Path) -> Iterator[None]:
    """Record what the units of `model` do inside the context, and write it to `path` in Chrome's format.

    Perfetto shows the file; `flatparam trace draw` makes a picture of the files of several ranks, and
    `flatparam trace diff` compares two. One lane has the units that compute, one what is sent: gathers from their issue
    until they are used, reductions from their issue until they are over. The curve is the memory of full parameters and
    of flat gradients. Times are the host's: on an accelerator, those at which the host queued the work.

    Args:
        model: a wrapped or sharded model; every rank may trace itself, to a path of its own.
        path: a file that ends in `.json`.
    """
    recorder = _Recorder({unit.module: unit.name for unit in units_in(model)})
    hooks = nn.modules.module
    before = hooks.register_module_forward_pre_hook(recorder.enters)
    after = hooks.register_module_forward_hook(recorder.leaves, always_call=True)
    try:
        with observe(model, recorder):
            yield
    finally:
        before.remove()
        after.remove()
        Path(path).write_text(recorder.picture(Path(path).stem).chrome(), encoding="utf-8")


@final
@attrs.define(eq=False)
class _Recorder:
    """An instrument that turns events into pieces of lanes."""

    modules: dict[nn.Module, str]
    pieces: list[Piece] = attrs.field(factory=list)
    heights: list[tuple[float, int]] = attrs.field(factory=list)
    clock: Callable[[], float] = time.perf_counter
    _began: float = attrs.field(init=False)
    _in_use: int = 0
    _running: list[tuple[str, float]] = attrs.field(factory=list)
    """The units whose forward calls are running, with the time since which each computes."""
    _sending: dict[tuple[str, str], float] = attrs.field(factory=dict)
    _backward: dict[str, float] = attrs.field(factory=dict)

    @_began.default
    def _now_is_zero(self) -> float:
        return self.clock()

    def _now(self) -> float:
        return self.clock() - self._began

    def _computed(self, unit: str, begin: float, what: str) -> None:
        self.pieces.append(Piece(COMPUTING, unit, f"{what} {unit}", begin, self._now()))

    def enters(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        if module not in self.modules:
            return
        if self._running:
            unit, begin = self._running[-1]
            self._computed(unit, begin, "forward")
        self._running.append((self.modules[module], self._now()))

    def leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module has returned."""
        if module not in self.modules or not self._running:
            return
        unit, begin = self._running.pop()
        self._computed(unit, begin, "forward")
        if self._running:
            self._running[-1] = (self._running[-1][0], self._now())

    def on_event(self, event: Event) -> None:
        """See `Instrument.on_event`."""
        unit, now = event.unit, self._now()
        if event.kind == "unshard":
            self._sending["all_gather", unit] = now
            self._changed(event.nbytes)
        elif event.kind == "use":
            self._sent("all_gather", unit)
            if not self._running:
                self._backward[unit] = now
        elif event.kind == "reduce":
            self._sending["reduce_scatter", unit] = now
            self._changed(event.nbytes)
        elif event.kind == "finish":
            self._sent("reduce_scatter", unit)
            self._changed(-event.nbytes)
        elif event.kind == "reshard":
            self._changed(-event.nbytes)
        if event.kind in ("reshard", "reduce") and unit in self._backward:
            self._computed(unit, self._backward.pop(unit), "backward")

    def _sent(self, what: str, unit: str) -> None:
        begin = self._sending.pop((what, unit), None)
        if begin is not None:
            self.pieces.append(Piece(COMMUNICATION, unit, f"{what} {unit}", begin, self._now()))

    def _changed(self, nbytes: int) -> None:
        self._in_use += nbytes
        self.heights.append((self._now(), self._in_use))

    def picture(self, title: str) -> Picture:
        """What was recorded."""
        most = max((height for _, height in self.heights), default=0)
        curve = Curve("unit buffers", tuple(self.heights), most) if self.heights else None
        return Picture(title, self.pieces, curve)
