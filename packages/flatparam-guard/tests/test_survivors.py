"""Ranks that meet after a failure: through the store of their process group, without a collective."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from pathlib import Path

import pytest

from flatparam_comm import (
    ByteLedger,
    CollectiveError,
    Collectives,
    ProcessGroupCollectives,
    RecordingCollectives,
    Survivors,
    run_threads,
    set_relay,
    shared_memory,
)
from flatparam_comm.testing import run_processes


def _meet(comm: ProcessGroupCollectives, through: str) -> list[list[object]]:
    ranks: Collectives = shared_memory(comm) if through == "shared memory" else RecordingCollectives(comm, ByteLedger())
    found: list[list[object]] = []
    for time_number in range(2):
        survivors = Survivors.of(ranks, ValueError("mine"), 60.0)
        assert (survivors.rank, survivors.size) == (comm.rank, 3)
        for number in range(3):
            found.append(survivors.exchange((time_number, number, comm.rank)))
        survivors.leave()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("through", ["gloo", "shared memory"])
def test_each_rank_gets_every_value(through: str) -> None:
    """Values come in rank order, those of each exchange and of each meeting by themselves, through decorators too."""
    expected = [[(each, number, rank) for rank in range(3)] for each in range(2) for number in range(3)]
    assert run_processes(3, _meet, through) == [expected] * 3


def _is_late(comm: ProcessGroupCollectives) -> str:
    if comm.rank == 1:
        time.sleep(1.0)
        return ""
    survivors = Survivors.of(comm, None, 0.3)
    with pytest.raises(CollectiveError) as caught:
        survivors.exchange(1, label="the place")
    return str(caught.value)


@pytest.mark.processes
def test_a_rank_that_does_not_come_is_named() -> None:
    """After the time that was given, the error names the rank, the exchange and the remedy."""
    told = run_processes(2, _is_late)[0]
    assert told.startswith("rank 0: exchange 'the place': rank 1 has not come within 0.3 s: its process has ended")
    assert told.endswith("make every rank catch its exception and call the same")


class Trap:
    """What a stranger would like to be unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(tempfile.gettempdir(), f"trap-{os.getppid()}"),)


def _is_deceived(comm: ProcessGroupCollectives) -> str:
    survivors = Survivors.of(comm, None, 60.0)
    if comm.rank == 1:
        # A stranger cannot sign.
        forged = pickle.dumps(Trap())
        survivors._store.set("1/1", bytes(32) + forged)
        return ""
    with pytest.raises(CollectiveError) as caught:
        survivors.exchange(1)
    assert not Path(tempfile.gettempdir(), f"trap-{os.getppid()}").exists()
    return str(caught.value)


@pytest.mark.processes
def test_what_a_stranger_writes_is_not_unpickled() -> None:
    """Whoever reaches the store can write to it; what no rank has signed is refused unread."""
    told = run_processes(2, _is_deceived)[0]
    assert told.startswith("rank 0: exchange: what the store holds of rank 1 was not written by a rank")


def _has_no_relay(comm: ProcessGroupCollectives) -> str:
    set_relay(False)
    with pytest.raises(CollectiveError) as caught:
        Survivors.of(comm, None, 60.0)
    return str(caught.value)


@pytest.mark.processes
def test_without_a_relay_nobody_can_sign() -> None:
    """Ranks whose relay is switched off are refused at once, with the remedy."""
    for told in run_processes(2, _has_no_relay):
        assert "expected a relay, by which ranks know a secret, found none" in told


def _as_threads(comm: Collectives) -> str:
    with pytest.raises(CollectiveError) as caught:
        Survivors.of(comm, None, 1.0)
    return str(caught.value)


def test_threads_have_no_store() -> None:
    """Ranks that are threads of one process are refused at once."""
    for rank, told in enumerate(run_threads(2, _as_threads)):
        assert told.startswith(f"rank {rank}: survivors: expected ranks that are processes of a process group")
