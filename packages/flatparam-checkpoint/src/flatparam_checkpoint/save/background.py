"""A save that goes on in a thread, whose failure somebody is told of even if nobody asks."""

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
from pathlib import Path
from typing import Final, final

from flatparam_checkpoint.agreement import Attempt, Failure
from flatparam_checkpoint.save.contribution import Contribution
from flatparam_files import CheckpointError
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.checkpoint.rank_part import Ticket, report_path
from flatparam_runtime import ExchangesValues

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


# How ranks wait for each other by files alone


_POLL_S: Final = 0.02
_LAST_PATIENCE_S: Final = 3.0
"""How long rank 0 looks for the reports of the others when they must be there."""
_COMMIT_PATIENCE_S: Final = 30.0
"""How long a rank that ends waits for rank 0 to commit."""
_PATIENCE_S: Final = 1800.0
"""How long a background save waits for the files of other ranks."""


def say_failed(temporary: Path, rank: int) -> None:
    """Leave the file by which rank 0 sees that `rank` has failed."""
    with contextlib.suppress(OSError):
        (temporary / f"rank-{rank:05d}.failed").touch()


def await_reports(temporary: Path, world_size: int, cancelled: threading.Event) -> None:
    """Wait until all ranks have written their parts to the temporary directory.

    Raises:
        CheckpointError: if one says that it has failed, or does not report in time.
    """
    deadline = time.monotonic() + _PATIENCE_S
    missing, hurried = list(range(world_size)), False
    while missing:
        missing = [rank for rank in missing if not report_path(temporary, rank).exists()]
        failed = sorted(temporary.glob("rank-*.failed"))
        if cancelled.is_set():
            deadline = min(deadline, time.monotonic() + _LAST_PATIENCE_S) if not hurried else deadline
            hurried = True
        if failed or (missing and time.monotonic() > deadline):
            who = failed[0].stem if failed else f"rank {missing[0]}"
            raise CheckpointError(f"{temporary}: {who} has not written its part", path=temporary, rank=int(who[5:]))
        if missing:
            time.sleep(_POLL_S)


def check_commit(ticket: Ticket, root: Path) -> None:
    """See at the end of the program that rank 0 has committed what another rank has written; it may have died.

    Args:
        root: the directory of the checkpoints.

    Raises:
        CheckpointError: if the temporary directory is still there after a while.
    """
    deadline = time.monotonic() + _COMMIT_PATIENCE_S
    while ticket.temporary.exists():
        if time.monotonic() > deadline or not DirectoryLock.is_taken(root):
            # It may have been committed, and the lock released, between the two looks.
            if not ticket.temporary.exists():
                return
            raise CheckpointError(
                f"{ticket.temporary}: rank 0 has not committed it",
                path=ticket.temporary,
                rank=0,
                hint="see why rank 0 has ended; call close() on every rank before the program ends",
            )
        time.sleep(_POLL_S)


# The save that goes on in a thread


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
        self._need = 0 if staged.value is None else staged.value.disk_nbytes
        if staged.cause is not None:
            # Its frames hold what was staged before the memory was used up.
            traceback.clear_frames(staged.cause.__traceback__)
        work = functools.partial(self._work, staged)
        name = f"checkpoint {ticket.step}, rank {ranks.rank}"
        self._background = Background(work, name, self._check_commit)

    def _check_commit(self) -> None:
        if self._ranks.rank != 0:
            check_commit(self.ticket, self._committer.directory.root)

    def _work(self, staged: Attempt[Contribution], own_part: threading.Event, cancelled: threading.Event) -> None:
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
        return Attempt(failure=Failure.of(cause, self._ranks.rank, directory=root, need=self._need), cause=cause)

    def cancel(self) -> BaseException | None:
        """Have it soon give up waiting for other ranks, and wait until it has ended; returns how it failed."""
        return self._background.cancel()
