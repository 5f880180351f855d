"""`tools/busy.py` keeps the machine busy while a command runs, and not a moment longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import busy
import pytest

from flatparam_comm.testing import PATIENCE

KILLED = """
import busy, time
with busy.busy(2) as pids:
    print(*pids, flush=True)
    time.sleep(3600)
"""


def is_there(pid: int) -> bool:
    """Whether a process has not ended; one that nobody waits for any more counts as ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_for_the_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, f"of {pids} there are some left"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_status_is_the_commands(program: str, status: int) -> None:
    """It exits as the command does; 128 + the signal where one has ended it."""
    assert busy.main(["1", "--", sys.executable, "-c", program]) == status


def test_they_are_there_while_it_runs() -> None:
    """As many as were asked for, and none of them afterwards, also where the block raises."""
    with suppress(ZeroDivisionError), busy.busy(3) as pids:
        assert len(set(pids)) == 3
        assert all(map(is_there, pids))
        raise ZeroDivisionError
    assert not any(map(is_there, pids))


def test_they_end_when_they_are_left_alone() -> None:
    """Where busy.py itself is killed, they end by themselves."""
    environment = {**os.environ, "PYTHONPATH": str(Path(busy.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_there, pids))
        process.send_signal(signal.SIGKILL)
    wait_for_the_end_of(pids)
