"""Work in the background: a thread, and the save that goes on in one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Final, final

from flatparam_runtime import Collectives
from flatparam_state.checkpoint.protocol import Attempt, Failure
from flatparam_state.checkpoint.save.commit import Committer
from flatparam_state.checkpoint.save.contribution import Contribution, Ticket
from flatparam_state.checkpoint.save.report import report_path
from flatparam_state.files import CheckpointError

__all__ = ["Background", "BackgroundSave"]

_POLL_S: Final = 0.02
_LAST_PATIENCE_S: Final = 3.0
"""How long rank 0 looks for the reports of the others when they must be there."""
_PATIENCE_S: Final = 1800.0
"""How long a background save waits for the files of other ranks."""


@final
class Background:
    """Runs `work` in a thread from now on, and keeps its failure until somebody asks.

    `work` gets an event to set when its own part is done, and one that tells it to give up waiting for other ranks.
    """

    def __init__(self, work: Callable[[threading.Event, threading.Event], None], name: str) -> None:
        """Start the thread."""
        self._error: Exception | None = None
        self._cancelled, self._own_part = threading.Event(), threading.Event()
        # Only the thread holds `work`, so that what `work` holds is freed when the thread ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        # The thread is a daemon, since any other would keep a failing program for ever.
        atexit.register(self.cancel)
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


@final
class BackgroundSave:
    """One save that goes on in a thread, where ranks talk through files alone."""

    def __init__(
        self,
        ranks: Collectives,
        committer: Committer,
        ticket: Ticket,
        contribution: Contribution,
        write_part: Callable[[Ticket, Contribution], None],
    ) -> None:
        """Start.

        Args:
            contribution: in host memory of its own.
            write_part: writes this rank's part.
        """
        self.ticket = ticket
        self._ranks = ranks
        self._committer = committer
        self._write_part = write_part
        work = functools.partial(self._work, contribution)
        self._background = Background(work, f"checkpoint {ticket.step}, rank {ranks.rank}")

    def _work(
        self, contribution: Contribution, own_part: threading.Event, cancelled: threading.Event
    ) -> None:
        failed = self.ticket.temporary / f"rank-{self._ranks.rank:05d}.failed"
        try:
            self._write_part(self.ticket, contribution)
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

    def cancel(self) -> None:
        """Have it soon give up waiting for other ranks, and wait until it has ended."""
        self._background.cancel()
