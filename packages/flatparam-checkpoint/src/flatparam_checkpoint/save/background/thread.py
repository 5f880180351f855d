"""Work in a thread, whose failure somebody is told of even if nobody asks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final, final

from flatparam_files import CheckpointError

__all__ = ["Background"]

_EXIT_CODE: Final = 1


@final
class Background:
    """Runs `work` in a thread from now on, and keeps its failure until somebody asks.

    `work` gets an event to set when its own part is done, and one that tells it to give up waiting for other ranks. If
    nobody has asked when the program ends, and it has failed, the program ends with an error.
    """

    def __init__(
        self,
        work: Callable[[threading.Event, threading.Event], None],
        name: str,
        last_check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            last_check: is called when the program ends and nobody has asked; raises a CheckpointError if what other
                ranks had to do is not done.
        """
        self._error: BaseException | None = None
        self._cancelled, self._own_part = threading.Event(), threading.Event()
        # Only the thread holds `work`, so that what `work` holds is freed when the thread ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        # The thread is a daemon, since any other would keep a failing program for ever.
        self._last_check = last_check
        atexit.register(self._end)
        self._thread.start()

    def _run(self, work: Callable[[threading.Event, threading.Event], None]) -> None:
        try:
            work(self._own_part, self._cancelled)
        except BaseException as error:
            self._error = error
        finally:
            self._own_part.set()

    def join(self) -> BaseException | None:
        """Wait until it has ended; returns how it failed, if it did."""
        self._thread.join()
        atexit.unregister(self._end)
        return self._error

    def cancel(self) -> BaseException | None:
        """Have it soon give up waiting for others, and wait for it: the program is failing; returns how it failed."""
        self.hurry()
        return self.join()

    def _end(self) -> None:
        """Wait for it at the end of the program, which is told of a failure by its exit code: nobody else asks."""
        error = self.cancel()
        try:
            if error is None:
                self._last_check()
                return
        except CheckpointError as found:
            error = found
        sys.stderr.write(f"flatparam: {self._thread.name}, was not saved: {error}\n")
        _FORGOTTEN.append(error)

    def hurry(self) -> None:
        """Have it soon give up waiting for others."""
        self._cancelled.set()

    def wait_for_own_part(self) -> None:
        """Wait until it has done, or failed to do, what needs no other rank."""
        self._own_part.wait()


_FORGOTTEN: Final[list[BaseException]] = []
"""The failures of saves that nobody had asked for when the program ended."""


def _exit_with_failure() -> None:
    """End the program with an error if it has forgotten a save that has failed.

    What an exit function raises does not change the exit code. This one is called after those that are registered
    later, such as those of saves, and those that were registered before are left out.
    """
    if _FORGOTTEN:
        logging.shutdown()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_EXIT_CODE)


atexit.register(_exit_with_failure)
