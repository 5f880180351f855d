"""A process that issues nothing: whether it has failed in the program's own code, and lives.

Nobody tells of such an exception: it came out of no call of flatparam's. But if the main thread handles it for long, as
in an `except` block, or a prompt has printed it, and the process does not compute, then it does not go on by itself.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final, final

from flatparam_guard.activity import ACTIVITY
from flatparam_guard.failure import FailureReport
from flatparam_guard.waiting.waits import place_of

__all__ = ["IdleWatch"]

#: The part of the time that a process may compute which does nothing: its threads wake now and then.
_BUSY: Final = 0.1
#: What Linux counts of the main thread: nanoseconds on a core, nanoseconds of waiting for one.
_SCHEDULED: Final = Path("/proc/self/schedstat")
#: The exceptions by which programs decide what to do next: there is no more data, no cache, no such package.
_DECIDES: Final = (
    *(StopIteration, StopAsyncIteration, GeneratorExit, LookupError),
    *(AttributeError, ImportError, EOFError, OSError),
)


@final
class IdleWatch:
    """Remembers since when this process has issued nothing."""

    def __init__(self, rank: int, patience: float) -> None:
        """A process of `rank` that issues nothing for `patience` seconds is looked at."""
        self._rank = rank
        self.patience = patience
        self._issued = -1
        self._since = self._computed = 0.0
        # An exception that was printed before has stopped nobody.
        self._printed = id(_printed())
        self._printed_after = -1

    def look(self, now: float) -> FailureReport | None:
        """The failure of the process, if it has one and does nothing about it."""
        if ACTIVITY.issued != self._issued or any(ACTIVITY.waits.values()):
            self._issued, self._since, self._computed = ACTIVITY.issued, now, _computed()
        printed = _printed()
        if id(printed) != self._printed:
            self._printed, self._printed_after = id(printed), ACTIVITY.issued
        error = _handled() or (printed if self._printed_after == ACTIVITY.issued else None)
        idle = now - self._since
        is_busy = _computed() - self._computed > _BUSY * idle
        if error is None or idle < self.patience or is_busy:
            return None
        main = threading.main_thread().ident or 0
        place = place_of(sys._current_frames().get(main))
        return FailureReport.of(
            self._rank, error, f"the program's own code, and is at {place} for {idle:.0f} s,"
        )


def _computed() -> float:
    """The seconds for which this process has computed, or for which its main thread was ready to and had no core."""
    try:
        waited = int(_SCHEDULED.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        # Only Linux counts them.
        waited = 0.0
    return time.process_time() + waited


def _handled() -> BaseException | None:
    """The exception that the main thread handles, unless programs decide by it, or it has issued something since."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # From Python 3.11 on the exception itself is there; before, a triple with it in the middle.
    error = found[1] if isinstance(found, tuple) else found
    if not isinstance(error, BaseException) or isinstance(error, _DECIDES) or id(error) == ACTIVITY.handled:
        return None
    return error


def _printed() -> BaseException | None:
    """The exception that an interactive prompt has printed last."""
    found = getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None
