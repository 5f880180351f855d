"""Shared memory when something goes wrong: ranks that die, stay away or call something else; and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatparam_comm import (
    CollectiveError,
    Collectives,
    MismatchError,
    ProcessGroupCollectives,
    RankDied,
    ReduceOp,
    set_relay,
    shared_memory,
)
from flatparam_comm.process_group import groups
from flatparam_comm.testing import BRIEFLY, PATIENCE, Fault, FaultyCollectives, Kill, run_processes
from flatparam_onehost import host as shared_host
from flatparam_onehost import moves as shared_moves

pytestmark = pytest.mark.processes


def _die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _doomed(shared: Collectives, moment: str) -> Collectives:
    """`shared`, such that this process is killed at that moment of step 3."""
    if moment == "before it starts":
        return FaultyCollectives(shared, [Fault("all_reduce", "step 3", action=Kill())])
    name = {"while it writes": "put", "while it reads": "take"}[moment]
    plain, calls = getattr(shared_moves._AllReduce, name), []

    def killing(self: Any, *tensors: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 4:
            tensors[0][:5] = 0
            _die()
        plain(self, *tensors)

    setattr(shared_moves._AllReduce, name, killing)
    return shared


def _tell(directory: str, comm: Collectives, error: CollectiveError) -> None:
    Path(directory, f"rank-{comm.rank}").write_text(f"{type(error).__name__}: {error}")


def _steps(comm: ProcessGroupCollectives, moment: str, directory: str) -> None:
    shared: Collectives = shared_memory(comm)
    shared.barrier()
    if comm.rank == 1:
        shared = _doomed(shared, moment)
    try:
        for step in range(10):
            value = torch.ones(50_000)
            shared.all_reduce(value, label=f"step {step}").wait()
            assert value.eq(3).all()
    except CollectiveError as error:
        with pytest.raises(CollectiveError, match="an earlier call failed: .*rank 1"):
            shared.exchange(1)
        _tell(directory, comm, error)


@pytest.mark.parametrize(("moment", "last"), [("before it starts", 3), ("while it writes", 3), ("while it reads", 4)])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, moment: str, last: int) -> None:
    """Killed at any moment, a rank is named by all others, with the call that needs it; the segment is in no directory."""
    with pytest.raises(RankDied, match="rank 1 of 3 was killed by SIGKILL"):
        run_processes(3, _steps, moment, str(tmp_path))
    for rank in (0, 2):
        told = (tmp_path / f"rank-{rank}").read_text()
        assert told.startswith(f"PeerError: rank {rank}: all_reduce 'step {last}': rank 1 failed first")
        assert re.search(r"process \d+ has ended|\(pid \d+\) has ended", told), told
    assert not [name for name in os.listdir("/dev/shm") if "flatparam" in name]


def _dies_connecting(comm: ProcessGroupCollectives, directory: str) -> None:
    if comm.rank == 1:
        shared_host._open = _die
    try:
        shared_memory(comm)
    except CollectiveError as error:
        _tell(directory, comm, error)


def test_a_rank_that_is_killed_while_it_connects_is_an_error(tmp_path: Path) -> None:
    """A rank that dies while memory is being shared is an error of the process group on the other."""
    with pytest.raises(RankDied, match="rank 1 of 2"):
        run_processes(2, _dies_connecting, str(tmp_path))
    assert "exchange 'shared memory: opened'" in (tmp_path / "rank-0").read_text()


def _stays_away(comm: ProcessGroupCollectives) -> str:
    # All ranks have arrived before a limit is short.
    comm.barrier()
    shared = shared_memory(ProcessGroupCollectives(dist.new_group(timeout=timedelta(seconds=BRIEFLY))))
    given_up = groups.store_of(comm.group, "given up", timedelta(seconds=PATIENCE))
    if comm.rank == 1:
        # Not in a collective: ranks that wait for each other are told at once.
        given_up.get("rank 0")
        with pytest.raises(CollectiveError, match="rank 0 no longer takes part") as raised:
            # The calls that rank 0 had posted before can still be finished.
            for _ in range(3):
                shared.all_reduce(torch.zeros(1)).wait()
        return str(raised.value)
    pending = shared.all_reduce(torch.zeros(1), label="gradient norm")
    assert not pending.done()
    with pytest.raises(CollectiveError) as raised:
        pending.wait()
    with pytest.raises(CollectiveError) as again:
        pending.wait()
    assert again.value is raised.value
    assert pending.done()
    given_up.set("rank 0", "")
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    """After the process group's timeout the missing ranks are named; those that arrive later are told, too."""
    away, late = run_processes(2, _stays_away)
    assert away.startswith(
        f"rank 0: all_reduce 'gradient norm': ranks [1] have not arrived within {BRIEFLY} s; make every"
    )
    assert late.startswith("rank 1: all_reduce: rank 0 no longer takes part")


def _calls(comm: Collectives, kind: str) -> Any:
    one, two = torch.zeros(4), torch.zeros(8)
    return {
        "all_gather": lambda: comm.all_gather(two, one, label="gather"),
        "larger": lambda: comm.all_gather(torch.zeros(80_000), torch.zeros(40_000)),
        "doubles": lambda: comm.all_gather(two.double(), one.double()),
        "reduce_scatter": lambda: comm.reduce_scatter(one, two),
        "largest": lambda: comm.all_reduce(one, op=ReduceOp.MAX),
        "sum": lambda: comm.all_reduce(one),
        "root 0": lambda: comm.broadcast(one),
        "root 1": lambda: comm.broadcast(one, root=1),
        "exchange": lambda: comm.exchange(1),
        "barrier": lambda: comm.barrier(),
    }[kind]()


def _mismatched(comm: ProcessGroupCollectives, kinds: tuple[str, str]) -> str:
    shared = shared_memory(comm)
    with pytest.raises(MismatchError) as raised:
        _calls(shared, kinds[comm.rank]).wait()
    with pytest.raises(CollectiveError, match="an earlier call failed"):
        shared.barrier()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kinds", "texts"),
    [
        (("all_gather", "larger"), ("all_gather (4 x float32)", "all_gather (40000 x float32)")),
        (("all_gather", "doubles"), ("all_gather (4 x float32)", "all_gather (4 x float64)")),
        (("reduce_scatter", "sum"), ("reduce_scatter (8 x float32, sum)", "all_reduce (4 x float32, sum)")),
        (("largest", "sum"), ("all_reduce (4 x float32, max)", "all_reduce (4 x float32, sum)")),
        (("root 0", "root 1"), ("broadcast (4 x float32, root 0)", "broadcast (4 x float32, root 1)")),
        (("exchange", "barrier"), ("exchange", "barrier")),
    ],
    ids=str,
)
def test_calls_that_differ_are_both_named(kinds: tuple[str, str], texts: tuple[str, str]) -> None:
    """If the ranks diverge, each rank has a MismatchError that says what both have called."""
    for told in run_processes(2, _mismatched, kinds):
        assert f"rank 0 called {texts[0]}; rank 1 called {texts[1]}; make every rank" in told


def _freed(comm: ProcessGroupCollectives) -> str:
    shared = shared_memory(comm)
    output = torch.zeros(8)
    if comm.rank == 1:
        # Rank 0 has freed its output.
        comm.barrier()
        shared.all_gather(output, torch.zeros(4)).wait()
        return ""
    pending = shared.all_gather(output, torch.zeros(4), label="freed")
    output.untyped_storage().resize_(0)
    comm.barrier()
    with pytest.raises(CollectiveError) as raised:
        pending.wait()
    return str(raised.value)


def test_an_output_that_was_freed_is_an_error() -> None:
    """Freeing the output before the wait is an error, not an access to memory that is gone."""
    assert "it was freed while the collective was under way" in run_processes(2, _freed)[0]


def _unpicklable(comm: ProcessGroupCollectives) -> None:
    shared = shared_memory(comm)
    with pytest.raises(CollectiveError, match="exchange 'facts': the value cannot be pickled"):
        shared.exchange(lambda: None, label="facts")
    assert shared.exchange(comm.rank) == [0, 1]


def test_what_cannot_be_pickled_is_an_error_of_the_exchange() -> None:
    """An unpicklable value is reported before anything is sent, so the group goes on."""
    run_processes(2, _unpicklable)


def _limited(comm: ProcessGroupCollectives, relayed: bool) -> str:
    """Rank 1 gets no address space for the slot of a large collective; what each rank is told."""
    set_relay(relayed)
    shared = shared_memory(comm)
    shared.barrier()
    value = torch.ones(1 << 26, dtype=torch.uint8)
    if comm.rank == 1:
        (pages,) = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        resource.setrlimit(resource.RLIMIT_AS, (int(pages) * 1024 + (1 << 24), resource.RLIM_INFINITY))
    try:
        shared.all_reduce(value, label="large").wait()
    except CollectiveError as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "nothing"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(CollectiveError, match="an earlier call failed"):
        shared.barrier()
    return told


@pytest.mark.parametrize("relayed", [True, False])
def test_a_rank_without_memory_is_named(relayed: bool) -> None:
    """A rank that gets no memory for a slot says so, and its peers do not wait for it, with the relay or without."""
    first, second, third = run_processes(3, _limited, relayed)
    assert re.search(
        r"CollectiveError: rank 1: all_reduce 'large': this rank cannot take part: .*emory.*ulimit -v", second
    )
    for told in (first, third):
        if relayed:
            assert re.search(r"PeerError: .*rank 1 failed first .*this rank cannot take part", told), told
        else:
            assert "rank 1 no longer takes part" in told


def _sealed(comm: ProcessGroupCollectives) -> list[tuple[str, int]]:
    """What becomes of attempts to resize each memory of this process, and the memories' modes."""
    shared_memory(comm).barrier()
    comm.barrier()
    found = []
    for entry in sorted(Path("/proc/self/fd").iterdir()):
        try:
            name = os.readlink(entry)
        except OSError:
            continue
        if name.startswith("/memfd:flatparam"):
            fd = int(entry.name)
            # What a peer has made for itself alone is open for reading.
            is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            for nbytes in (0, os.fstat(fd).st_size + 4096) if is_writable else ():
                with pytest.raises(PermissionError):
                    os.truncate(fd, nbytes)
            found.append((name.split(":")[1].split(" (")[0], stat.S_IMODE(os.fstat(fd).st_mode)))
    return found


def test_shared_memory_is_sealed_and_private() -> None:
    """Nobody can truncate the memory under a rank that reads it, and only the user can open it."""
    for found in run_processes(2, _sealed):
        assert {name for name, _ in found} == {"flatparam", "flatparam positions"}
        assert {mode for _, mode in found} == {0o600}
