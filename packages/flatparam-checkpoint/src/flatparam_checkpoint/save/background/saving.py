"""The save that goes on in a thread."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from typing import final

from flatparam_checkpoint.agreement import Attempt, Failure
from flatparam_checkpoint.save.background.thread import Background
from flatparam_checkpoint.save.background.waiting import await_reports, check_commit, say_failed
from flatparam_files.checkpoint import Committer, Contribution, Ticket
from flatparam_runtime import ExchangesValues

__all__ = ["BackgroundSave"]


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
        if self._ranks.rank != 0:
            check_commit(self.ticket, self._committer.directory.root)

    def _work(
        self, staged: Attempt[Contribution], own_part: threading.Event, cancelled: threading.Event
    ) -> None:
        try:
            if staged.value is None:
                raise staged.cause or AssertionError("what was staged is there, or why it is not")
            self._write_part(self.ticket, staged.value)
            staged = Attempt()
            own_part.set()
            if self._ranks.rank == 0:
                await_reports(self.ticket.temporary, self._ranks.size, cancelled)
                self._committer.commit(self.ticket, self._ranks.size)
        except BaseException:
            # Rank 0 sees the file; the directory stays until nobody writes to it any more.
            say_failed(self.ticket.temporary, self._ranks.rank)
            raise

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

    def cancel(self) -> BaseException | None:
        """Have it soon give up waiting for other ranks, and wait until it has ended; returns how it failed."""
        return self._background.cancel()
