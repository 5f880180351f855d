"""From a command line to an exit status: launch the ranks, or be one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .control import Control
from .errors import UserError
from .launch import is_under_torchrun, launch, threads_per_rank
from .options import Options, parse
from .plan import make_plan
from .report import Console, complain
from .stop import StopRequests, exit_status


def run(arguments: Sequence[str], *, script: str) -> int:
    """Run the job; returns 0, 2 for what the user has to put right, or 128 + the signal that stopped it early."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        options = parse(arguments)
        if is_under_torchrun():
            return _be_a_rank(options, rank, int(os.environ["WORLD_SIZE"]))
        ranks = 1 if options.plain and options.ranks is None else options.ranks or 2
        if ranks == 1:
            return _be_a_rank(options, 0, 1)
        resumed = make_plan(options, ranks).resumed
        if resumed is not None:
            resumed.check_files()
        return launch(
            script,
            arguments,
            ranks=ranks,
            threads=threads_per_rank(options.threads, ranks),
            console=Console(True),
        )
    except UserError as error:
        if rank == 0:
            complain(str(error))
        return 2


def _be_a_rank(options: Options, rank: int, world_size: int) -> int:
    control = Control(options.control) if options.control is not None else None
    requests = StopRequests(control)
    requests.listen()
    if control is not None:
        control.register(rank)
    from flatparam import CheckpointError  # imports torch; a stop signal from here on waits for a step

    from .session import train

    try:
        stopped_by = train(options, world_size, requests, Console(is_loud=rank == 0))
    except CheckpointError as error:
        raise UserError(str(error)) from error
    if not stopped_by:
        return 0
    if control is None:
        return exit_status(stopped_by)
    if rank == 0:
        control.confirm_stopped(stopped_by)
    return 0  # the launcher ends with the signal's status; here it would look to torchrun like a failure
