"""Ctrl-C and SIGTERM, remembered until a step is done."""

from __future__ import annotations

import signal
from types import FrameType

from attrs import define

from .control import Control

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name) and not (name == "SIGHUP" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
)
"""The signals that mean: finish the step, write a checkpoint, end. Under ``nohup`` SIGHUP stays ignored."""


@define(eq=False)
class StopRequests:
    """What asked this process to stop: its own signals, or the launcher's.

    A signal only sets a field, so it cannot break a step or a collective; the ranks agree on it after each step.
    The third one ends the process at once, for someone who will not wait.
    """

    control: Control | None
    _signum: int = 0
    _count: int = 0

    def listen(self) -> None:
        """Take over the stop signals of this process; main thread only."""
        for each in STOP_SIGNALS:
            signal.signal(each, self._remember)

    def pending(self) -> int:
        """The number of the signal to stop for, or 0."""
        if self._signum or self.control is None:
            return self._signum
        asked = self.control.stop_requested()
        if asked is None and self.control.launcher_is_gone():
            asked = int(signal.SIGTERM)
        return asked or 0

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum
        self._count += 1
        if self._count >= 3:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def exit_status(signum: int) -> int:
    """The status that shells expect of a process that ended for a signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum
