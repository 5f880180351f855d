"""Making gloo give up what it waits for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flatparam_comm import ProcessGroupCollectives
from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_guard.torch_groups import stop_waiting

pytestmark = pytest.mark.processes


def _receive(failed: list[str]) -> None:
    try:
        dist.recv(torch.empty(1), src=1)
    except RuntimeError as error:
        failed.append(str(error))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _stops_after_rank_0(comm: ProcessGroupCollectives, directory: str) -> None:
    closed, stopped = Path(directory, "closed"), Path(directory, "stopped")
    comm.barrier()
    if comm.rank == 0:
        stop_waiting(comm.group)
        closed.touch()
    if comm.rank == 2:
        failed: list[str] = []
        waiting = threading.Thread(target=_receive, args=(failed,), daemon=True)
        waiting.start()
        _wait_for(closed)
        stop_waiting(comm.group)
        waiting.join(PATIENCE)
        stopped.touch()
        assert failed, "it waits for rank 1, which sends nothing"
    _wait_for(stopped)


def test_a_rank_stops_waiting_after_another_one_has(tmp_path: Path) -> None:
    """A rank that waits for a second one stops waiting, though a third has closed its connections before."""
    run_processes(3, _stops_after_rank_0, str(tmp_path))
