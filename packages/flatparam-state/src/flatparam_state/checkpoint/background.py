"""Work beside training: one thread, whose failure is kept until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from typing_extensions import final

__all__ = ["Background"]


@final
class Background:
    """Runs `work` in a thread from now on. `work` gets an event that tells it to give up waiting for other ranks."""

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        """Start."""
        self._error: Exception | None = None
        self._cancelled = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
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
        return self._error

    def cancel(self, patience_s: float) -> None:
        """Wait for it, and after `patience_s` have it give up waiting for others."""
        self._thread.join(patience_s)
        self._cancelled.set()
        self._thread.join()
