"""Work beside training: one thread, whose failure is kept until somebody asks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Final

from typing_extensions import final

__all__ = ["Background"]

_LAST_PATIENCE_S: Final = 3.0


@final
class Background:
    """Runs `work` in a thread from now on. `work` gets an event that tells it to give up waiting for other ranks."""

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        """Start."""
        self._error: Exception | None = None
        self._cancelled = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        atexit.register(self.cancel)  # a thread that is no daemon would keep a failing program for ever
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work(self._cancelled)
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def join(self) -> Exception | None:
        """Wait until it has ended; returns how it failed, if it did."""
        self._thread.join()
        atexit.unregister(self.cancel)
        return self._error

    def cancel(self) -> None:
        """Wait for it, and after a while have it give up waiting for others: the program is failing, or ends."""
        self._thread.join(_LAST_PATIENCE_S)
        self._cancelled.set()
        self.join()
