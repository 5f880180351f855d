"""Work beside training: one thread, whose failure is kept until somebody asks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from typing_extensions import final

__all__ = ["Background"]


@final
class Background:
    """Runs `work` in a thread from now on.

    `work` gets an event to set when its own part is done, and one that tells it to give up waiting for other ranks.
    """

    def __init__(self, work: Callable[[threading.Event, threading.Event], None], name: str) -> None:
        """Start."""
        self._error: Exception | None = None
        self._cancelled, self._own_part = threading.Event(), threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        atexit.register(self.cancel)  # a thread that is no daemon would keep a failing program for ever
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work(self._own_part, self._cancelled)
        except Exception as error:
            self._error = error
        finally:
            self._own_part.set()

    def join(self) -> Exception | None:
        """Wait until it has ended; returns how it failed, if it did."""
        self._thread.join()
        atexit.unregister(self.cancel)
        return self._error

    def cancel(self) -> None:
        """Have it soon give up waiting for others, and wait for it: the program is failing, or ends."""
        self.hurry()
        self.join()

    def hurry(self) -> None:
        """Have it soon give up waiting for others."""
        self._cancelled.set()

    def wait_for_own_part(self) -> None:
        """Wait until it has done, or failed to do, what needs no other rank."""
        self._own_part.wait()
