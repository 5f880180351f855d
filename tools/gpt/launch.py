"""Starting the ranks through torchrun, and standing by until they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final

from attrs import define

from .control import Control
from .report import Console
from .stop import STOP_SIGNALS, exit_status

_SAME_REQUEST_SECONDS: Final = 1.0
"""A second signal sooner than this is the first one again (a terminal and a supervisor may both send it)."""


def is_under_torchrun() -> bool:
    """Whether this process is already one of torchrun's ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(asked: int | None, ranks: int) -> int:
    """Threads for each rank: as asked, else the cores shared out."""
    return asked if asked is not None else max(1, cores() // ranks)


def launch(script: str, arguments: Sequence[str], *, ranks: int, threads: int, console: Console) -> int:
    """Run ``script`` on ``ranks`` ranks and return the exit status: theirs, or 128 + the signal they stopped for."""
    with TemporaryDirectory(prefix="train-launch-") as folder:
        control = Control(Path(folder))
        control.open()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            script, *arguments, "--control", folder,
        ]  # fmt: skip
        console.fact("launch", f"torchrun --standalone --nproc-per-node {ranks} {Path(script).name} ...")
        console.detail("Ctrl-C finishes the running step and leaves a checkpoint")
        return _Launch(control, console, _environment(threads)).run(command)


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


@define(eq=False)
class _Launch:
    """One torchrun process. It gets a session of its own, so that a terminal's Ctrl-C reaches only the launcher."""

    control: Control
    console: Console
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    asked_at: float | None = None
    ended_by: int = 0

    def run(self, command: Sequence[str]) -> int:
        before = {each: signal.signal(each, self._on_signal) for each in STOP_SIGNALS}
        try:
            self.process = subprocess.Popen(command, env=self.environment, start_new_session=True)
            status = self.process.wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        return self._judge(status)

    def _judge(self, status: int) -> int:
        if self.ended_by:
            self.console.warn("ended at once; the step that was running is not in any checkpoint.")
            return exit_status(self.ended_by)
        stopped_by = self.control.stopped_by()
        if stopped_by is not None:
            return exit_status(stopped_by)
        if status:
            self.console.warn(f"the ranks failed (torchrun's status {status}); the first error is above.")
        return 1 if status < 0 else status

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            self.control.request_stop(signum)
            self.console.warn("stopping after the running step (Ctrl-C again ends it at once)")
        elif now - self.asked_at > _SAME_REQUEST_SECONDS:
            self.ended_by = signum
            self._kill()

    def _kill(self) -> None:
        """End the agent first, so that it does not report its ranks as failed, then the ranks' process groups."""
        if self.process is not None:
            self.process.kill()
        for pid in self.control.rank_pids():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
