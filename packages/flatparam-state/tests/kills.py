"""Processes that are killed at a call, whatever their speed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType


def fork(work: Callable[[], None]) -> int:
    """Do `work` in a child; returns its process id. The child's exit code is 1 where it raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def end_of(pid: int) -> int:
    """The exit code of a child that ends: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class KillAtCall:
    """Kills this process at so many calls and returns of functions, of Python and of C, after `start`.

    A machine that is busy changes nothing about when that is. Calls of threads that start later count as well.
    """

    def __init__(self, count: int) -> None:
        self._count, self._seen = count, itertools.count(1)

    def start(self) -> None:
        """Begin to count."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if next(self._seen) == self._count:
            os.kill(os.getpid(), signal.SIGKILL)
