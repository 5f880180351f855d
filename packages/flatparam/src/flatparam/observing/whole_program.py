"""Traces of a whole program, one of each rank, from the first wrapper to the end of the process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final, final

import attrs
from torch import nn

from flatparam.observing.recording import Recorder
from flatparam.observing.stopwatch import rank_here
from flatparam_runtime import Unit

__all__ = ["nothing_recorded", "record"]

_MOST: Final = 100_000
"""A rank's trace has so many pieces at most: those of the first steps."""
_LOCK: Final = threading.Lock()
_traces: dict[str, _ProgramTrace] = {}


class _Here(threading.local):
    is_paused = False


_HERE: Final = _Here()


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Inside, this thread's units are none of the program's: they are rehearsed."""
    before, _HERE.is_paused = _HERE.is_paused, True
    try:
        yield
    finally:
        _HERE.is_paused = before


def record(unit: Unit, folder: str) -> None:
    """Record what `unit` does; at the end of the process, the trace of its rank is written to `folder`."""
    if _HERE.is_paused:
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
        hooks = nn.modules.module
        hooks.register_module_forward_pre_hook(self._enters)
        hooks.register_module_forward_hook(self._leaves, always_call=True)
        # Processes that multiprocessing has started end without the handlers of `atexit`.
        Finalize(None, self.write, exitpriority=0)

    def take(self, unit: Unit) -> None:
        """Have the recorder of this rank know `unit`."""
        rank = rank_here()
        with _LOCK:
            recorder = self.recorders.setdefault(rank, Recorder(_MOST))
        recorder.units[unit.module] = unit
        unit.observers.instruments.append(recorder)

    def _enters(self, module: nn.Module, args: Any) -> None:
        for recorder in self.recorders.values():
            recorder.enters(module, args)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        for recorder in self.recorders.values():
            recorder.leaves(module, args, output)

    def write(self) -> None:
        """Write a trace of each rank; one without a step leaves no file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank, recorder in self.recorders.items():
            if recorder.pieces:
                text = recorder.picture(f"rank{rank}").chrome()
                (self.folder / f"rank{rank}.json").write_text(text, encoding="utf-8")
