"""The world of threads: stopped by a timeout, an interrupt, or a fault on demand."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from flatparam_comm import Collectives, RankError, WorldTimeout
from flatparam_comm.testing import PATIENCE, Fault, Kill, Raise, longer_and_longer, run_threads


def test_a_timeout_says_where_everybody_is() -> None:
    """After the timeout the error says who waits for what and where the others run; the world is stopped."""

    def stuck_in_a_computation(comm: Collectives, release: threading.Event) -> None:
        if comm.rank == 1:
            release.wait()
        comm.barrier(label="end")

    for limit in longer_and_longer(0.2):
        release = threading.Event()
        with pytest.raises(WorldTimeout, match=f"not done after {limit} s") as raised:
            run_threads(2, stuck_in_a_computation, release, timeout=limit)
        release.set()
        _assert_threads_end()
        # Rank 1 had got this far by then.
        if "rank 1 is running" in str(raised.value):
            break
    assert "rank 0 waits for barrier 'end'" in str(raised.value)
    assert "rank 1 is running" in str(raised.value)
    assert isinstance(raised.value, TimeoutError)


def test_an_interrupt_stops_the_world() -> None:
    """Ctrl-C in the main thread comes out of run_threads, and no rank goes on."""

    def for_ever(comm: Collectives) -> None:
        for step in range(10**9):
            if step == 20 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            comm.barrier()

    # A process that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(2, for_ever)
    finally:
        signal.signal(signal.SIGINT, before)
    _assert_threads_end()


def _assert_threads_end() -> None:
    deadline = time.monotonic() + PATIENCE
    while any(thread.name.startswith("rank-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a rank's thread is still running"
        time.sleep(0.01)


def test_a_fault_is_raised_at_the_collective_it_names() -> None:
    """Raise hits the n-th matching call of the rank that it names, and no other."""
    calls: list[tuple[int, str]] = []

    def program(comm: Collectives) -> None:
        for step in range(3):
            for unit in ("layers.0", "layers.1", "head"):
                comm.all_gather(torch.zeros(2), torch.zeros(1), label=unit).wait()
                calls.append((comm.rank, f"{unit} step {step}"))

    boom = OSError("link down")
    fault = Fault("all_gather", "layers.*", rank=1, nth=3, action=Raise(boom))
    with pytest.raises(RankError) as raised:
        run_threads(2, program, faults=[fault])
    assert raised.value.rank == 1
    assert raised.value.__cause__ is boom
    assert [call for rank, call in calls if rank == 1][-1] == "layers.0 step 1"


def test_faults_reach_subgroups() -> None:
    """A fault's rank and number are those of the outermost group, also for calls on its subgroups."""

    def program(comm: Collectives) -> None:
        pair = comm.subgroup([1, 2])
        comm.barrier()
        if pair is not None:
            pair.barrier()

    with pytest.raises(RankError, match="rank 2 of 3 failed with OSError: down"):
        run_threads(3, program, faults=[Fault("barrier", rank=2, nth=1, action=Raise(OSError("down")))])


def test_killing_a_thread_is_refused() -> None:
    """Kill in a world of threads is a ValueError that points to run_processes: it would kill the caller."""
    with pytest.raises(ValueError, match=r"use flatparam_comm\.testing\.run_processes"):
        run_threads(2, lambda comm: None, faults=[Fault(action=Kill())])


def test_a_world_has_ranks() -> None:
    """A world of no ranks is a ValueError."""
    with pytest.raises(ValueError, match="found world_size=0"):
        run_threads(0, lambda comm: None)
