"""The relay of failures between processes: what each rank is told when another one fails, and what a healthy run pays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from flatparam_comm import (
    PeerError,
    ProcessGroupCollectives,
    RankDied,
    RankError,
    telling,
)
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


class Bug(Exception):
    """An exception of the user's program."""


def _steps(comm: ProcessGroupCollectives, last: int = 3) -> None:
    for step in range(last):
        value = torch.ones(1000)
        comm.all_reduce(value, label=f"step {step}").wait()
        assert value.eq(comm.size).all()


def _wait_for_it(comm: ProcessGroupCollectives, directory: str) -> None:
    """Wait for a rank that never comes, and write down what is raised."""
    with pytest.raises(PeerError) as raised:
        comm.all_reduce(torch.ones(1000), label="the next step").wait()
    with pytest.raises(PeerError) as again:
        comm.all_reduce(torch.ones(1000), label="one more")
    error = raised.value
    text = f"{error.rank}|{error.waiting_rank}|{error}|{again.value}"
    Path(directory, f"rank-{comm.rank}").write_text(text)


def _fails(comm: ProcessGroupCollectives, directory: str, how: str) -> None:
    _steps(comm)
    if comm.rank != 1:
        _wait_for_it(comm, directory)
        return
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise Bug("a bug of the user's")
    if how == "exits":
        os._exit(3)
    with pytest.raises(Bug), telling("the loss"):
        raise Bug("caught, and nothing follows")
    # The process lives on and issues nothing, as a notebook does.
    while len(list(Path(directory).glob("rank-*"))) < comm.size - 1:
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "raises", "exits", "lives"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_that_waits_is_told(tmp_path: Path, size: int, how: str) -> None:
    """A rank that is killed, raises, exits or catches its exception and stays away is named by all, with the cause."""
    try:
        run_processes(size, _fails, str(tmp_path), how)
    except RankDied:
        assert how in ("killed", "exits")
    except RankError as error:
        assert how == "raises"
        assert "failed with Bug: a bug of the user's" in str(error)
    else:
        assert how == "lives"
    for rank in {*range(size)} - {1}:
        culprit, waiting, told, again = (tmp_path / f"rank-{rank}").read_text().split("|")
        assert (culprit, waiting) == ("1", str(rank))
        cause = {
            "killed": "rank 1 failed first with the end of its process: process ",
            "exits": "rank 1 failed first with the end of its process: process ",
            "raises": "rank 1 failed first with Bug: a bug of the user's",
            "lives": "rank 1 failed first in the loss with Bug: caught, and nothing follows",
        }[how]
        assert told.startswith(f"rank {rank}: all_reduce 'the next step': {cause}")
        assert again.startswith(
            f"rank {rank}: all_reduce 'one more': the process group is broken, since {cause}"
        )
