"""Ranks that wait for each other for ever, in different calls: each of them is told, and no rank that is only slow."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from each_row import each_row

from flatparam_comm import (
    Collectives,
    MismatchError,
    PeerError,
    ProcessGroupCollectives,
    shared_memory,
    telling,
)
from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_guard import torch_groups
from flatparam_guard.deadlocks import Deadlocks, stuck_among
from flatparam_guard.waits import Stand, Wait, _wait_of_torchs

ALL = (0, 1, 2)


def _stand(*waits: Wait, key: int = 1, torch: int = 0, **counts: int) -> Stand:
    return Stand(key, waits, counts, {"world": torch})


def _ours(group: str, number: int, members: tuple[int, ...] = ALL, at: int = 0) -> Wait:
    return Wait(group, number, members, f"all_gather '{group}'", at=at)


def _torchs(number: int, members: tuple[int, ...] = ALL) -> Wait:
    return Wait("world", number, members, "torch's barrier", is_torchs=True, at=number)


GATHER, SAVE = _ours("shm", 3), _ours("world", 5)


@each_row(
    ("stands", "stuck"),
    [
        # Two transports: each has issued what the other has not.
        ({0: _stand(GATHER, shm=3, world=4), 1: _stand(SAVE, shm=2, world=5)}, [0, 1]),
        # The same with a third rank that waits like the first.
        (
            {
                0: _stand(GATHER, shm=3, world=4),
                1: _stand(SAVE, shm=2, world=5),
                2: _stand(GATHER, shm=3, world=4),
            },
            [0, 1, 2],
        ),
        # All wait for rank 2, which computes.
        ({0: _stand(GATHER, shm=3, world=4), 1: _stand(GATHER, shm=3, world=4)}, []),
        # Rank 1 has issued it, and waits for rank 2.
        ({0: _stand(GATHER, shm=3, world=4), 1: _stand(SAVE, shm=3, world=5)}, []),
        # A circle of three, of pairs.
        (
            {
                0: _stand(_ours("a", 1, (0, 1)), a=1),
                1: _stand(_ours("b", 1, (1, 2)), b=1),
                2: _stand(_ours("c", 1, (0, 2)), c=1),
            },
            [0, 1, 2],
        ),
        # A rank that waits for two that wait for each other waits for ever, too.
        (
            {
                0: _stand(_ours("a", 1, (0, 1)), a=1),
                1: _stand(_ours("b", 1, (0, 1)), b=1),
                2: _stand(_ours("c", 1, (0, 2)), c=1),
            },
            [0, 1, 2],
        ),
        # One thread of rank 1 waits in vain, another one only for rank 2.
        ({0: _stand(GATHER, shm=3), 1: _stand(_ours("pair", 1, (0, 1)), _ours("x", 1, (1, 2)), pair=1)}, []),
        # Torch's barrier on one rank, a pass over shared memory on the other.
        ({0: _stand(_ours("shm", 3, (0, 1)), shm=3), 1: _stand(_torchs(1, (0, 1)), shm=2, torch=1)}, [0, 1]),
        # The same over one process group, in which both have issued something as its tenth.
        (
            {
                0: _stand(_ours("world", 10, (0, 1), at=10), world=10, torch=10),
                1: _stand(_torchs(10, (0, 1)), world=9, torch=10),
            },
            [0, 1],
        ),
        # Rank 0 has issued torch's call and left it: it is rank 2 that rank 1 waits for.
        (
            {
                0: _stand(_ours("world", 10, at=11), world=10, torch=11),
                1: _stand(_torchs(10), world=9, torch=10),
            },
            [],
        ),
        # Two ranks are in torch's barrier, and the third one waits for them.
        (
            {
                0: _stand(GATHER, shm=3),
                1: _stand(_torchs(1), shm=2, torch=1),
                2: _stand(_torchs(1), shm=2, torch=1),
            },
            [0, 1, 2],
        ),
        # Torch's call may be one in which rank 1 does not wait for rank 0.
        ({0: _stand(GATHER, shm=3), 1: _stand(_torchs(1), shm=2, torch=1)}, []),
        # A rank that has failed, and one that waits for it in torch's barrier.
        ({0: _stand(_torchs(1, (0, 1)), torch=1), 1: _stand()}, [0, 1]),
    ],
)
def test_who_is_stuck(stands: dict[int, Stand], stuck: list[int]) -> None:
    """Ranks are stuck exactly if nothing that they wait for can come, as far as is known of the others."""
    assert sorted(stuck_among(stands)) == stuck


def test_ranks_are_asked_before_they_are_told() -> None:
    """Ranks that wait for each other are told if all of them say once more that they do, in the same waits."""
    stands = {0: _stand(GATHER, shm=3, world=4), 1: _stand(SAVE, shm=2, world=5, key=7)}
    known = Deadlocks()
    known.note(0, stands[0], 0)
    assert known.next_question() == (0, [])
    known.note(1, stands[1], 0)
    assert known.next_question() == (1, [0, 1])
    known.note(0, stands[0], 1)
    assert known.found() is None
    # Rank 1 went on and waits again: what it said first was old.
    known.note(1, _stand(SAVE, shm=3, world=5, key=8), 1)
    assert known.found() is None
    assert known.next_question() == (0, [])
    known.note(1, stands[1], 0)
    assert known.next_question() == (2, [0, 1])
    known.note(0, stands[0], 2)
    known.note(1, stands[1], 2)
    knot = known.found()
    assert knot is not None
    assert (knot.speakers, knot.groups) == ([0, 1], ("shm", "world"))
    assert "rank 0 waits in all_gather 'shm' of group 'shm'; rank 1 waits in" in knot.description
    assert known.found() is None


def test_a_stand_travels_as_plain_values() -> None:
    """A stand arrives as it was sent."""
    stand = _stand(GATHER, _torchs(3), shm=3)
    assert Stand.from_words(stand.to_words()) == stand


def _other(comm: ProcessGroupCollectives, how: str) -> None:
    """What rank 1 does, while the others wait for it."""
    value = torch.ones(4)
    if how == "a collective of another transport":
        comm.all_reduce(value, label="another transport").wait()
    elif how == "torch's barrier":
        dist.barrier()
    elif how == "torch's all_reduce":
        dist.all_reduce(value)
    elif how == "torch's all_gather_object":
        dist.all_gather_object([None] * comm.size, 1)
    elif how == "torch's broadcast":
        dist.broadcast(value, 0)
    else:
        raise AssertionError(how)


def _parts(comm: ProcessGroupCollectives, directory: str, through: str, how: str) -> None:
    ours = shared_memory(comm) if through == "shared memory" else comm
    second = dist.new_group() if how == "torch's barrier of another group" else None
    for _ in range(2):
        ours.all_reduce(torch.ones(1000), label="a step").wait()
        dist.barrier()
    try:
        if comm.rank != 1:
            with pytest.raises(MismatchError) as raised:
                ours.all_reduce(torch.ones(1000), label="a step more").wait()
            Path(directory, f"rank-{comm.rank}").write_text(str(raised.value))
        elif second is not None:
            dist.barrier(second)
        else:
            _other(comm, how)
    except (MismatchError, RuntimeError):
        # Torch's own error, of a connection that was closed.
        assert comm.rank == 1
    if comm.rank == 1:
        Path(directory, "rank-1").touch()
    # Everybody lives, so nothing ends by the end of a process.
    while len(list(Path(directory).glob("rank-*"))) < comm.size:
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize(
    "how",
    [
        "a collective of another transport",
        "torch's barrier",
        "torch's all_reduce",
        "torch's all_gather_object",
        "torch's broadcast",
        "torch's barrier of another group",
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_for_each_other_are_told(tmp_path: Path, size: int, through: str, how: str) -> None:
    """One rank is in a call of another transport, or of torch's own: nobody waits for the timeout, and ours name it."""
    if through == "gloo" and how in ("a collective of another transport", "torch's all_reduce"):
        pytest.skip("it is the same transport, and gloo ends a process that receives what it does not expect")
    run_processes(size, _parts, str(tmp_path), through, how, timeout=PATIENCE, pg_timeout=2 * PATIENCE)
    for rank in {*range(size)} - {1}:
        told = (tmp_path / f"rank-{rank}").read_text()
        assert told.startswith(f"rank {rank}: all_reduce 'a step more': the ranks diverge: they wait for each other")
        name = "all_reduce 'another transport'" if "transport" in how else "torch.distributed."
        assert f"rank 1 waits in {name}" in told, told
        assert "rank 0 waits in all_reduce 'a step more' of group" in told, told


def _new_group(comm: ProcessGroupCollectives, directory: str) -> None:
    comm.barrier()
    if comm.rank == 1:
        # Nothing can end this wait but the end of the process, or of the store.
        threading.Thread(target=_leave_when, args=(Path(directory, "rank-0"),), daemon=True).start()
        dist.new_group()
        raise AssertionError("rank 0 never comes")
    with pytest.raises(MismatchError) as raised:
        comm.all_reduce(torch.ones(4), label="a step").wait()
    Path(directory, "rank-0").write_text(str(raised.value))


def _leave_when(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
    os._exit(0)


@pytest.mark.processes
def test_a_rank_in_new_group(tmp_path: Path) -> None:
    """One rank makes a group while the other waits for it in a collective: the other is told."""
    with pytest.raises(Exception, match="rank 1 of 2 ended"):
        run_processes(2, _new_group, str(tmp_path), pg_timeout=2 * PATIENCE)
    assert "rank 1 waits in torch.distributed.new_group(), called at" in (tmp_path / "rank-0").read_text()


def _crosses(comm: ProcessGroupCollectives, directory: str) -> None:
    one, other = (ProcessGroupCollectives(dist.new_group()) for _ in range(2))
    for group in (one, other):
        group.barrier()
    order = (one, other) if comm.rank == 0 else (other, one)
    with pytest.raises(MismatchError, match="they wait for each other in different calls"):
        for group in order:
            group.all_reduce(torch.ones(4), label="crossed").wait()
    Path(directory, f"rank-{comm.rank}").touch()
    while len(list(Path(directory).glob("rank-*"))) < comm.size:
        time.sleep(0.01)


@pytest.mark.processes
def test_two_groups_in_two_orders(tmp_path: Path) -> None:
    """Ranks that use two groups in different orders, and wait in between, are told."""
    run_processes(2, _crosses, str(tmp_path), pg_timeout=2 * PATIENCE)


def _waits_for_a_failed_one(comm: ProcessGroupCollectives, directory: str) -> None:
    comm.barrier()
    told = Path(directory, "told")
    if comm.rank == 1:
        try:
            with telling("the loss"):
                raise ValueError("a bug of the user's")
        except ValueError:
            while not told.exists():
                time.sleep(0.01)
        return
    with pytest.raises(RuntimeError):
        dist.barrier()
    with pytest.raises(PeerError, match="rank 1 failed first in the loss .* with ValueError: a bug"):
        comm.barrier()
    told.touch()


@pytest.mark.processes
def test_a_barrier_of_torchs_for_a_rank_that_has_failed(tmp_path: Path) -> None:
    """A rank that waits in torch's barrier for one that has failed, and lives, waits no longer; ours then say why."""
    run_processes(2, _waits_for_a_failed_one, str(tmp_path), pg_timeout=2 * PATIENCE)


def _destroys(comm: ProcessGroupCollectives) -> None:
    group = dist.new_group([0])
    # As in torch's own file, a frame that has the group, for as long as `destroy_process_group` runs and after.
    known: dict[str, Any] = {"frame": sys._getframe}
    exec(compile("def call(group):\n    return frame()", torch_groups.source_file(), "exec"), known)
    frame = known["call"](group)
    found = _wait_of_torchs(frame)
    assert found is not None
    assert found[1].members == (0,)
    dist.destroy_process_group(group)
    assert _wait_of_torchs(frame) is None


@pytest.mark.processes
def test_a_group_that_is_destroyed_is_waited_for_by_nobody() -> None:
    """Whoever looks at the stacks while a group goes finds no wait, and goes on: before, the relay ended with KeyError."""
    run_processes(1, _destroys)


#: Longer than ranks wait until they ask whether they wait for each other.
SLOW = 2.0


def _computes_alone(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    if comm.rank == 1:
        time.sleep(SLOW)


def _barriers_late(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    if comm.rank == 1:
        time.sleep(SLOW)
    dist.barrier()


def _gathers_to_the_slowest(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    """Rank 0 waits for rank 2, and rank 1, which has sent its part, waits in ours for rank 0."""
    if comm.rank == 2:
        time.sleep(SLOW)
    value = torch.ones(4)
    dist.gather(value, [torch.empty(4) for _ in range(comm.size)] if comm.rank == 0 else None, 0)


def _issues_before(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    """Ranks 0 and 2 have issued torch's call, and wait for rank 1 in ours before they wait for torch's."""
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if comm.rank == 1:
        time.sleep(SLOW)
        work.wait()
    ours.barrier()
    work.wait()


def _uses_pairs(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    """Ranks 0 and 1 wait in their pair, and rank 2, which waits for them in ours, is late."""
    pair = comm.subgroup([0, 1])
    if comm.rank == 1:
        time.sleep(SLOW)
    if pair is not None:
        pair.barrier()


def _in_a_thread(comm: ProcessGroupCollectives, ours: Collectives) -> None:
    """A second thread of each rank has a group of its own, and rank 1 is late in both."""
    own = ProcessGroupCollectives(dist.new_group())
    own.barrier()

    def work() -> None:
        if comm.rank == 1:
            time.sleep(SLOW / 2)
        for _ in range(3):
            own.all_reduce(torch.ones(4)).wait()
            time.sleep(SLOW / 4)

    thread = threading.Thread(target=work)
    thread.start()
    if comm.rank == 0:
        time.sleep(SLOW)
    ours.barrier()
    thread.join()


_PROGRAMS: list[Callable[..., Any]] = [
    _computes_alone,
    _barriers_late,
    _gathers_to_the_slowest,
    _issues_before,
    _uses_pairs,
    _in_a_thread,
]


def _is_slow(comm: ProcessGroupCollectives, program: Callable[..., Any], through: str) -> None:
    ours = shared_memory(comm) if through == "shared memory" else comm
    ours.barrier()
    for _ in range(2):
        program(comm, ours)
        ours.all_reduce(torch.ones(1000), label="the next step").wait()


@pytest.mark.processes
@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize("program", _PROGRAMS)
def test_a_slow_rank_is_waited_for(program: Callable[..., Any], through: str) -> None:
    """No rank of a program in which one is slow is stopped, whatever the others wait in."""
    run_processes(3, _is_slow, program, through)
