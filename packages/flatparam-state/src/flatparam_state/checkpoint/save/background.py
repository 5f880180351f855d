"""Work in the background: a thread, and the save that goes on in one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, final

from flatparam_runtime import ExchangesValues
from flatparam_state.checkpoint.protocol import Attempt, DirectoryLock, Failure
from flatparam_state.checkpoint.save.commit import Committer
from flatparam_state.checkpoint.save.contribution import Contribution, Ticket
from flatparam_state.checkpoint.save.report import report_path
from flatparam_state.files import CheckpointError

__all__ = ["Background", "BackgroundSave"]

_POLL_S: Final = 0.02
_LAST_PATIENCE_S: Final = 3.0
"""How long rank 0 looks for the reports of the others when they must be there."""
_EXIT_CODE: Final = 1
_COMMIT_PATIENCE_S: Final = 30.0
"""How long a rank that ends waits for rank 0 to commit."""
_PATIENCE_S: Final = 1800.0
"""How long a background save waits for the files of other ranks."""


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
        self._error: Exception | None = None
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
        except Exception as error:
            self._error = error
        finally:
            self._own_part.set()

    def join(self) -> Exception | None:
        """Wait until it has ended; returns how it failed, if it did."""
        self._thread.join()
        atexit.unregister(self._end)
        return self._error

    def cancel(self) -> Exception | None:
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


_FORGOTTEN: Final[list[Exception]] = []
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


@final
class BackgroundSave:
    """One save that goes on in a thread, where ranks talk through files alone."""

    def __init__(
        self,
        ranks: ExchangesValues,
        committer: Committer,
        ticket: Ticket,
        staged: Attempt[Contribution],
        write_part: Callable[[Ticket, Contribution], None],
    ) -> None:
        """Start.

        Args:
            staged: what this rank writes, in host memory of its own; or why there was no memory for it.
            write_part: writes this rank's part.
        """
        self.ticket = ticket
        self._ranks = ranks
        self._committer = committer
        self._write_part = write_part
        if staged.cause is not None:
            # Its frames hold what was staged before the memory was used up.
            traceback.clear_frames(staged.cause.__traceback__)
        work = functools.partial(self._work, staged)
        name = f"checkpoint {ticket.step}, rank {ranks.rank}"
        self._background = Background(work, name, self._check_commit)

    def _check_commit(self) -> None:
        """See at the end of the program that rank 0 has committed what this rank has written; it may have died.

        Raises:
            CheckpointError: if the temporary directory is still there after a while.
        """
        deadline = time.monotonic() + _COMMIT_PATIENCE_S
        while self._ranks.rank != 0 and self.ticket.temporary.exists():
            if time.monotonic() > deadline or not DirectoryLock.is_taken(self._committer.directory.root):
                # It may have been committed, and the lock released, between the two looks.
                if not self.ticket.temporary.exists():
                    return
                raise CheckpointError(
                    f"{self.ticket.temporary}: rank 0 has not committed it",
                    path=self.ticket.temporary,
                    rank=0,
                    hint="see why rank 0 has ended; call close() on every rank before the program ends",
                )
            time.sleep(_POLL_S)

    def _work(
        self, staged: Attempt[Contribution], own_part: threading.Event, cancelled: threading.Event
    ) -> None:
        failed = self.ticket.temporary / f"rank-{self._ranks.rank:05d}.failed"
        try:
            if staged.value is None:
                raise staged.cause or AssertionError("what was staged is there, or why it is not")
            self._write_part(self.ticket, staged.value)
            staged = Attempt()
            own_part.set()
            if self._ranks.rank == 0:
                self._await_reports(cancelled)
                self._committer.commit(self.ticket, self._ranks.size)
        except BaseException:
            # Rank 0 sees the file; the directory stays until nobody writes to it any more.
            with contextlib.suppress(OSError):
                failed.touch()
            raise

    def _await_reports(self, cancelled: threading.Event) -> None:
        temporary = self.ticket.temporary
        deadline = time.monotonic() + _PATIENCE_S
        missing, hurried = list(range(self._ranks.size)), False
        while missing:
            missing = [rank for rank in missing if not report_path(temporary, rank).exists()]
            failed = sorted(temporary.glob("rank-*.failed"))
            if cancelled.is_set():
                deadline = min(deadline, time.monotonic() + _LAST_PATIENCE_S) if not hurried else deadline
                hurried = True
            if failed or (missing and time.monotonic() > deadline):
                who = failed[0].stem if failed else f"rank {missing[0]}"
                raise CheckpointError(
                    f"{temporary}: {who} has not written its part", path=temporary, rank=int(who[5:])
                )
            if missing:
                time.sleep(_POLL_S)

    def finish(self) -> Attempt[None]:
        """Wait until the save has ended on every rank, well or not; every rank calls it."""
        # Ranks that are threads of one process: each must have started its own work before one waits for it.
        self._ranks.barrier(label="wait for a checkpoint")
        self._background.wait_for_own_part()
        # A rank that has died is the process group's to notice, here; the others have reported by now.
        self._ranks.barrier(label="every rank has written")
        self._background.hurry()
        cause = self._background.join()
        if cause is None:
            return Attempt()
        root = self._committer.directory.root.absolute()
        return Attempt(failure=Failure.of(cause, self._ranks.rank, directory=root), cause=cause)

    def cancel(self) -> Exception | None:
        """Have it soon give up waiting for other ranks, and wait until it has ended; returns how it failed."""
        return self._background.cancel()
