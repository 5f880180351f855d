"""How ranks wait for each other by files alone."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Final

from flatparam_files import CheckpointError
from flatparam_files.checkpoint import DirectoryLock, Ticket, report_path

__all__ = ["await_reports", "check_commit", "say_failed"]

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
            raise CheckpointError(
                f"{temporary}: {who} has not written its part", path=temporary, rank=int(who[5:])
            )
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
