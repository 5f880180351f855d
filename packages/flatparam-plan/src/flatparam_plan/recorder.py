"""A trace of a running model: what each unit did and when, on the host's clock, as a trace for Perfetto."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final, final

import attrs
from torch import nn, optim

from flatparam.debug_log import rank_here
from flatparam_plan.picture import (
    BACKWARD,
    COMMUNICATION,
    COMPUTING,
    FORWARD,
    PHASE,
    STEP,
    WAITING,
    Curve,
    Picture,
    Piece,
)
from flatparam_runtime import BackwardOrder, Event, Phase, Unit, observe, units_in

_LANES: Final = (PHASE, COMPUTING, COMMUNICATION, WAITING)
_ROOT: Final = "(root)"


@contextlib.contextmanager
def trace(model: nn.Module, path: str | Path) -> Iterator[None]:
    """Record what the units of `model` do inside the context, and write it to `path` in Chrome's format.

    Perfetto shows the file; `flatparam trace draw` makes a picture of the files of several ranks, and
    `flatparam trace diff` compares two. One lane has the units that compute, one what is sent: gathers from their issue
    until they are used, reductions from their issue until they are over, and one the waits of the host for these. The
    curve is the memory of full parameters and of flat gradients, and its line is the peak by the formula of
    `docs/memory.md`. Times are the host's: on an accelerator, those at which the host queued the work.

    To record a whole program, from its first wrapper on, start it by `flatparam trace --out FOLDER train.py`, or with
    `FLATPARAM_TRACE=FOLDER` in the environment.

    Args:
        model: a wrapped or sharded model; every rank may trace itself, to a path of its own.
        path: a file that ends in `.json`.
    """
    recorder = Recorder()
    for unit in units_in(model):
        recorder.units[unit.module] = unit
    hooks = _watch({rank_here(): recorder})
    try:
        with observe(model, recorder):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        Path(path).write_text(recorder.picture(Path(path).stem).chrome(), encoding="utf-8")


def _watch(recorders: Mapping[int, Recorder]) -> list[Any]:
    """Tell the recorders, by rank, of modules that are entered and left, and of each rank's optimizers that step."""

    def enters(module: nn.Module, args: Any) -> None:
        for recorder in recorders.values():
            recorder.enters(module)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        for recorder in recorders.values():
            recorder.leaves(module)

    def steps(ends: bool) -> None:
        if rank_here() in recorders:
            recorders[rank_here()].seen(STEP, ends=ends)

    modules: Any = nn.modules.module
    optimizers: Any = sys.modules[optim.Optimizer.__module__]
    return [
        modules.register_module_forward_pre_hook(enters),
        modules.register_module_forward_hook(leaves, always_call=True),
        optimizers.register_optimizer_step_pre_hook(lambda *_: steps(False)),
        optimizers.register_optimizer_step_post_hook(lambda *_: steps(True)),
    ]


@final
@attrs.define(eq=False)
class Recorder:
    """An instrument that turns events into pieces of lanes, until it has `most` of them."""

    most: int = sys.maxsize
    units: MutableMapping[nn.Module, Unit] = attrs.field(factory=weakref.WeakKeyDictionary)
    pieces: list[Piece] = attrs.field(factory=list)
    heights: list[tuple[float, int]] = attrs.field(factory=list)
    clock: Callable[[], float] = time.perf_counter
    _began: float = attrs.field(init=False, default=attrs.Factory(lambda self: self.clock(), takes_self=True))
    _in_use: int = 0
    _running: list[tuple[Unit, float]] = attrs.field(factory=list)
    """The units whose forward calls are running, with the time since which each computes."""
    _sending: dict[tuple[str, str], float] = attrs.field(factory=dict)
    _backward: dict[str, float] = attrs.field(factory=dict)
    _waiting: dict[tuple[str, str], float] = attrs.field(factory=dict)
    _computed_until: float = 0.0
    _told: set[str] = attrs.field(factory=set)
    """The units whose backward passes are over, but not their reductions."""
    _line: int = 0
    _phase: tuple[str, float, float] | None = None
    """The phase of the step that is running, since when, and when something of it was last seen."""

    def _now(self) -> float:
        return self.clock() - self._began

    def _computed(self, unit: str, begin: float, what: str) -> None:
        self._computed_until = self._now()
        self._add(Piece(COMPUTING, unit, f"{what} {unit}", begin, self._computed_until))

    def _add(self, piece: Piece) -> None:
        if len(self.pieces) < self.most:
            self.pieces.append(piece)

    def enters(self, module: nn.Module) -> None:
        """A module is called."""
        if module not in self.units:
            return
        if self._running:
            unit, begin = self._running[-1]
            self._computed(unit.name, begin, FORWARD)
        else:
            self.seen(FORWARD)
        # It gets its name in the first pass.
        self._running.append((self.units[module], self._now()))

    def leaves(self, module: nn.Module) -> None:
        """A module has returned."""
        if module not in self.units or not self._running:
            return
        unit, begin = self._running.pop()
        self._computed(unit.name, begin, "forward")
        if self._running:
            self._running[-1] = (self._running[-1][0], self._now())
        else:
            self.seen(FORWARD, ends=True)

    def seen(self, phase: str, *, ends: bool = False) -> None:
        """Note that `phase` is running; one that runs already goes on, and any other one is over."""
        now = self._now()
        if self._phase is not None and self._phase[0] == phase:
            self._phase = (phase, self._phase[1], now)
        else:
            self._end_phase()
            self._phase = (phase, now, now)
        if ends:
            self._end_phase()

    def _end_phase(self) -> None:
        if self._phase is not None:
            name, begin, end = self._phase
            self._add(Piece(PHASE, name, name, begin, end))
        self._phase = None

    def on_event(self, event: Event) -> None:
        """Draw what begins and ends with `event`."""
        unit, now = event.unit, self._now()
        goes_on = self._phase is not None and self._phase[0] == BACKWARD
        if not self._running and event.phase is Phase.FORWARD:
            self.seen(FORWARD)
        elif not self._running and (goes_on or event.phase is Phase.BACKWARD):
            self.seen(BACKWARD)
        if event.kind == "unshard":
            self._sending["all_gather", unit] = now
            self._changed(event.nbytes)
        elif event.kind == "use":
            self._sent("all_gather", unit)
            if event.phase is Phase.BACKWARD:
                self._backward[unit] = now
            elif self._running and self._running[-1][0].name == unit:
                # It has waited for its own parameters, and begins to compute now.
                self._running[-1] = (self._running[-1][0], now)
        elif event.kind == "reduce":
            self._sending["reduce_scatter", unit] = now
            self._changed(event.nbytes)
        elif event.kind == "finish":
            self._sent("reduce_scatter", unit)
            self._changed(-event.nbytes)
        elif event.kind == "reshard":
            self._changed(-event.nbytes)
            if not self._line:
                # At the end of the program, the units may be gone.
                self.know_line()
        if event.kind in ("reshard", "reduce") and unit in self._backward:
            self._computed(unit, self._backward.pop(unit), "backward")
            self._told.add(unit)
        elif event.kind == "reduce" and self._phase is not None and unit not in self._told:
            # It kept its parameters, so that nothing was told when its backward pass began.
            self._computed(unit, max(self._phase[1], self._computed_until), "backward")
        if event.kind == "reduce":
            self._told.discard(unit)

    def _sent(self, what: str, unit: str) -> None:
        lanes = ((COMMUNICATION, self._sending, what), (WAITING, self._waiting, f"wait for {what}"))
        for lane, begins, told in lanes:
            if (what, unit) in begins:
                self._add(Piece(lane, unit, f"{told} {unit}", begins.pop((what, unit)), self._now()))

    def on_wait(self, unit: str, operation: str) -> None:
        """Note when the host began to wait for a collective of `unit`."""
        self._waiting[operation, unit] = self._now()

    def _changed(self, nbytes: int) -> None:
        self._in_use += nbytes
        if len(self.pieces) < self.most:
            self.heights.append((self._now(), self._in_use))

    def know_line(self) -> None:
        """Work out the peak by the formula, while the units are there; the largest of several models counts."""
        for root in [unit for unit in self.units.values() if unit.name == _ROOT]:
            self._line = max(self._line, peak_of_units(units_in(root.module)))

    def picture(self, title: str) -> Picture:
        """Return the recorded lanes and curve, as a picture."""
        self.know_line()
        self._end_phase()
        curve = Curve("unit buffers", tuple(self.heights), self._line) if self.heights else None
        return Picture(title, sorted(self.pieces, key=lambda piece: _LANES.index(piece.lane)), curve)


def peak_of_units(units: Sequence[Unit]) -> int:
    """Return the peak of a step of `units`, the root first and the others in the order of their forward passes.

    This is the formula of `docs/memory.md`. It holds for units that run one after the other; what activations take
    comes on top.
    """
    root, *others = units
    full, flat = root.unsharded_nbytes, _flat_nbytes(root)
    most, kept = full + flat, 0
    for number, unit in enumerate(others):
        prefetch, own = unit.plan.prefetch, unit.unsharded_nbytes
        before = others[number - 1] if number else None
        after = others[number + 1] if number + 1 < len(others) else None
        runs_ahead = unit.device.type != "cpu"
        ahead = 0
        if after is not None and (prefetch.forward or runs_ahead):
            ahead = after.unsharded_nbytes
        in_forward = full + kept + own + ahead
        ahead = reducing = 0
        if before is not None and before.plan.free_after_forward:
            ahead = before.unsharded_nbytes
        if after is not None and runs_ahead:
            reducing = _flat_nbytes(after)
        computing = max(own, _flat_nbytes(unit))
        if prefetch.backward is BackwardOrder.BEFORE_COMPUTE:
            computing += ahead
        elif prefetch.backward is BackwardOrder.AFTER_COMPUTE:
            computing = max(own, _flat_nbytes(unit) + ahead)
        most = max(most, in_forward, full + flat + kept + computing + reducing)
        if not unit.plan.free_after_forward:
            kept += own
    return most


def _flat_nbytes(unit: Unit) -> int:
    """Return the bytes of the unsharded gradients."""
    return sum(handle.gradients.buffer.nbytes for handle in unit.trainable)


_MOST: Final = 100_000
"""A rank's trace has so many pieces at most: those of the first steps."""
_LOCK: Final = threading.Lock()
_traces: dict[str, _ProgramTrace] = {}


_IS_PAUSED: Final = ContextVar("flatparam's traces are paused", default=False)


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Record nothing of this thread inside: its units are none of the program's, they are rehearsed."""
    token = _IS_PAUSED.set(True)
    try:
        yield
    finally:
        _IS_PAUSED.reset(token)


def record(unit: Unit, folder: str) -> None:
    """Record what `unit` does; at the end of the process, the trace of its rank is written to `folder`."""
    if _IS_PAUSED.get():
        return
    with _LOCK:
        if folder not in _traces:
            _traces[folder] = _ProgramTrace(Path(folder))
    _traces[folder].take(unit)


@final
@attrs.define(eq=False)
class _ProgramTrace:
    """The recorders of the ranks of this process: one, or one of each thread that is a rank."""

    folder: Path
    recorders: dict[int, Recorder] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(
                f"expected a folder for the traces of the ranks, found the file {str(self.folder)!r}; give --out, or "
                "FLATPARAM_TRACE, a different name"
            )
        _watch(self.recorders)
        # Processes that multiprocessing has started end without the handlers of `atexit`.
        Finalize(None, self.write, exitpriority=0)

    def take(self, unit: Unit) -> None:
        """Have the recorder of this rank know `unit`."""
        rank = rank_here()
        with _LOCK:
            recorder = self.recorders.setdefault(rank, Recorder(_MOST))
        recorder.units[unit.module] = unit
        unit.observers.instruments.append(recorder)

    def write(self) -> None:
        """Write a trace of each rank; one without a step leaves no file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank, recorder in self.recorders.items():
            if recorder.pieces:
                text = recorder.picture(f"rank{rank}").chrome()
                (self.folder / f"rank{rank}.json").write_text(text, encoding="utf-8")
