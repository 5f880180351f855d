"""The folder through which the launching process and its ranks talk: stop, stopped, who is alive.

Why a folder and not signals: torchrun's agent passes a signal on, but then kills ranks that need more than 30
seconds to finish their step and write a checkpoint, and shows a traceback of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from attrs import frozen

_LAUNCHER: Final = "launcher.pid"
_REQUESTED: Final = "stop-requested"
_STOPPED: Final = "stopped"


@frozen
class Control:
    """One launch's folder; every file in it holds one number."""

    folder: Path

    def open(self) -> None:
        """Launcher: say who watches over this launch."""
        self._write(_LAUNCHER, os.getpid())

    def request_stop(self, signum: int) -> None:
        """Launcher: ask every rank to stop after its running step, because of signal ``signum``."""
        self._write(_REQUESTED, signum)

    def stopped_by(self) -> int | None:
        """Launcher: the signal that the ranks say they stopped for, or None when they did not."""
        return self._read(_STOPPED)

    def rank_pids(self) -> list[int]:
        """Launcher: the processes of the ranks that have started."""
        return [pid for path in sorted(self.folder.glob("rank-*.pid")) if (pid := self._read(path.name))]

    def register(self, rank: int) -> None:
        """Rank: say that it has started."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def stop_requested(self) -> int | None:
        """Rank: the signal to stop for, if the launcher asks or is gone (which nobody could tell the ranks)."""
        return self._read(_REQUESTED)

    def launcher_is_gone(self) -> bool:
        """Rank: whether the launching process has ended without waiting for its ranks."""
        launcher = self._read(_LAUNCHER)
        if launcher is None:
            return True
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def confirm_stopped(self, signum: int) -> None:
        """Rank 0: say that the run stopped early and for which signal."""
        self._write(_STOPPED, signum)

    def _write(self, name: str, number: int) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(str(number))
        temporary.replace(self.folder / name)

    def _read(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text())
        except FileNotFoundError:
            return None
