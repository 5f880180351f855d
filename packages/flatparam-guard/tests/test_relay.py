"""The relay of failures between processes: what each rank is told when another one fails, and what a healthy run pays."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from flatparam_comm import (
    CollectiveError,
    CommError,
    PeerError,
    ProcessGroupCollectives,
    RankDied,
    RankError,
    Topology,
    set_relay,
    shared_memory,
    tell_failure,
    telling,
)
from flatparam_comm.process_group import groups
from flatparam_comm.testing import BRIEFLY, PATIENCE, run_processes
from flatparam_guard.process import _NOW
from flatparam_guard.relay_settings import RelaySettings

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
    kept: list[BaseException] = []
    try:
        with telling("the loss"):
            raise Bug("caught, and nothing follows")
    except Bug as error:
        if how == "lives":
            kept.append(error)
    # The process lives on and issues nothing, as a notebook does, which keeps the exception.
    while len(list(Path(directory).glob("rank-*"))) < comm.size - 1:
        time.sleep(0.05)
    assert len(kept) == (how == "lives")


@pytest.mark.parametrize("how", ["killed", "raises", "exits", "lives", "forgets"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_that_waits_is_told(tmp_path: Path, size: int, how: str) -> None:
    """A rank that is killed, raises, exits or catches its exception and stays away is named by all, with the cause."""
    try:
        run_processes(size, _fails, str(tmp_path), how, grace=PATIENCE)
    except RankDied:
        assert how in ("killed", "exits")
    except RankError as error:
        assert how == "raises"
        assert "failed with Bug: a bug of the user's" in str(error)
    else:
        assert how in ("lives", "forgets")
    for rank in {*range(size)} - {1}:
        culprit, waiting, told, again = (tmp_path / f"rank-{rank}").read_text().split("|")
        assert (culprit, waiting) == ("1", str(rank))
        cause = {
            "killed": "rank 1 failed first with the end of its process: process ",
            "exits": "rank 1 failed first with the end of its process: process ",
            "raises": "rank 1 failed first before the first optimizer step with Bug: a bug of the user's",
            "lives": "rank 1 failed first in the loss before the first optimizer step with Bug: caught, and nothing follows",
            "forgets": "rank 1 failed first in the loss before the first optimizer step with Bug: caught, and nothing follows",
        }[how]
        # The news may have come before the call.
        told = told.replace("the process group is broken, since ", "", 1)
        assert told.startswith(f"rank {rank}: all_reduce 'the next step': {cause}")
        assert again.startswith(f"rank {rank}: all_reduce 'one more': the process group is broken, since {cause}")


def _fails_at_once(comm: ProcessGroupCollectives, directory: str, which: int, how: str, through: str) -> None:
    os.environ["FLATPARAM_RELAY_IDLE"] = "0.3"
    if comm.rank == which:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        try:
            raise Bug("the model cannot be built")
        except Bug:
            if how == "raises":
                raise
            # It asks for the environment again at the first collective, which never comes.
            assert _NOW.relay is not None
            _NOW.relay.set(RelaySettings.read())
            while not Path(directory, "told").exists():
                time.sleep(0.05)
        return
    with pytest.raises(PeerError) as raised:
        (shared_memory(comm) if through == "shared memory" else comm).barrier()
    Path(directory, "told").write_text(f"{raised.value.rank}|{raised.value}")


@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize("how", ["killed", "raises", "exits", "lives"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_fails_before_its_first_collective(tmp_path: Path, which: int, how: str, through: str) -> None:
    """A rank that fails after `init_process_group`, before it has used anything of flatparam's, is named by the other."""
    try:
        run_processes(2, _fails_at_once, str(tmp_path), which, how, through, grace=PATIENCE)
    except RankError:
        assert how != "lives"
    culprit, told = (tmp_path / "told").read_text().split("|")
    assert culprit == str(which)
    cause = "with Bug: the model cannot be built" if how in ("raises", "lives") else "with the end of its process"
    assert cause in told


_REST = 0.5
"""Seconds of sleep: one that wakes often on a busy machine waits for a core so often that it seems to compute."""


def _handles(comm: ProcessGroupCollectives, directory: str, how: str) -> None:
    os.environ["FLATPARAM_RELAY_IDLE"] = "0.3"
    _steps(comm)
    told = Path(directory, "told")
    if comm.rank == 0:
        if how in ("handles it", "has printed it"):
            with pytest.raises(PeerError) as raised:
                _steps(comm)
            told.write_text(str(raised.value))
        else:
            for _ in range(1 + (how == "has gone on since")):
                _steps(comm)
        return
    if how == "has none":
        time.sleep(1.5)
    elif how == "has no more data":
        try:
            next(iter(()))
        except StopIteration:
            # The workers of the next epoch begin.
            time.sleep(1.5)
    elif how == "has gone on since":
        try:
            raise MemoryError("a smaller batch")
        except MemoryError:
            _steps(comm)
            time.sleep(1.5)
    elif how == "computes":
        try:
            raise Bug("no cache")
        except Bug:
            until = time.process_time() + 1.5
            while time.process_time() < until:
                pass
    elif how == "handles it":
        try:
            raise Bug("between two passes")
        except Bug:
            while not told.exists():
                time.sleep(_REST)
    else:
        # As a prompt does.
        sys.last_value = Bug("between two passes")
        while not told.exists():
            time.sleep(_REST)
    if how not in ("handles it", "has printed it"):
        _steps(comm)


@pytest.mark.parametrize(
    "how", ["handles it", "has printed it", "has none", "computes", "has no more data", "has gone on since"]
)
def test_an_exception_between_two_passes_of_a_process_that_lives(tmp_path: Path, how: str) -> None:
    """Whoever waits for a rank that handles an exception of its own, and does nothing, is told; a slow one is not."""
    run_processes(2, _handles, str(tmp_path), how)
    if how in ("handles it", "has printed it"):
        told = (tmp_path / "told").read_text()
        assert "rank 1 failed first in the program's own code, and is at test_relay.py:" in told
        assert told.endswith("with Bug: between two passes")


def _loses_its_relay(comm: ProcessGroupCollectives, which: int, directory: str) -> None:
    _steps(comm)
    relay = _NOW.relay
    assert relay is not None
    if comm.rank == which:

        def fail(timeout: float) -> None:
            raise RuntimeError("a fault of the relay's")

        relay._star.listen = fail  # type: ignore[method-assign, assignment]
        relay._star.wake()
    deadline = time.monotonic() + PATIENCE
    while (relay.is_running if comm.rank == which else which not in relay._deaf) and time.monotonic() < deadline:
        time.sleep(0.01)
    # Its connection has ended by now; nobody takes that for its death.
    comm.barrier()
    time.sleep(0.2)
    _steps(comm)
    Path(directory, f"rank-{comm.rank}").touch()


@pytest.mark.parametrize("which", [0, 1])
def test_a_relay_that_fails_stops_nobody(tmp_path: Path, which: int) -> None:
    """If the relay of one rank fails, whichever it is, the others know that its process lives, and all go on."""
    run_processes(3, _loses_its_relay, which, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3


def _catches(comm: ProcessGroupCollectives, alike: bool) -> None:
    os.environ["FLATPARAM_RELAY_FORGIVENESS"] = "600"
    for attempt in range(20):
        _steps(comm)
        if alike or comm.rank == 1:
            with pytest.raises(Bug), telling("an attempt"):
                raise Bug(f"attempt {attempt}")
            if attempt % 5 == 0:
                # Longer than the relay waits before it tells.
                time.sleep(0.2)
    _steps(comm)


@pytest.mark.parametrize("alike", [True, False])
def test_an_exception_that_the_program_catches_stops_nobody(alike: bool) -> None:
    """If a rank, or every rank alike, catches its exception and issues its next collective, training goes on."""
    run_processes(2, _catches, alike)


def _catches_and_diverges(comm: ProcessGroupCollectives) -> str:
    """One rank fails before a collective that the other has issued, and goes on at once with a different one."""
    _steps(comm)
    comm.barrier()
    try:
        if comm.rank == 1:
            # Not before the other rank has issued its own.
            time.sleep(0.5)
            with telling("a step"):
                raise Bug("in a batch")
    except Bug:
        pass
    with pytest.raises(CommError) as caught:
        comm.all_reduce(torch.ones(1 + comm.rank), label="a step").wait()
    return str(caught.value)


def test_what_a_rank_has_caught_is_named_if_the_ranks_diverge_after_it() -> None:
    """Every rank reads the exception that the program has caught: it is why the ranks are in different places."""
    for said in run_processes(2, _catches_and_diverges):
        assert "rank 1 issues all_reduce of 2 x float32" in said
        assert (
            "rank 1 had failed in a step before the first optimizer step with Bug: in a batch, and its program" in said
        )


def _begins_anew(comm: ProcessGroupCollectives, how: str) -> None:
    """One rank fails, the others are told, all catch their errors, and go on with groups that are new."""
    _steps(comm)
    try:
        if comm.rank == 1:
            with telling("a step"):
                raise Bug
        comm.all_reduce(torch.ones(1), label="in vain").wait()
    except (Bug, PeerError):
        pass
    for number in range(3):
        # torch's own barrier, of which the relay knows nothing.
        dist.barrier(dist.new_group())
        group = ProcessGroupCollectives(dist.new_group())
        if how == "late" and comm.rank == 1:
            time.sleep(0.5)
        assert group.exchange(number) == [number] * comm.size


@pytest.mark.parametrize("how", ["at once", "late"])
def test_groups_that_are_made_after_a_failure_work(how: str) -> None:
    """A caught failure breaks the groups of then, and none that the ranks make together later."""
    run_processes(2, _begins_anew, how)


def _differs(comm: ProcessGroupCollectives) -> tuple[str, bool]:
    """Issue a different collective than the other rank, and report the error as a program's backward pass does."""
    _steps(comm)
    group = ProcessGroupCollectives(dist.new_group())
    assert group.exchange(0) == [0, 0]
    with pytest.raises(CommError) as caught:
        for _ in range(2):
            if comm.rank == 0:
                group.all_reduce(torch.ones(3)).wait()
            else:
                group.all_gather(torch.empty(8), torch.ones(4)).wait()
    tell_failure(caught.value, "backward pass")
    # The relay's thread may have spoken before this second report, or not: what it says next must hold both.
    relay = _NOW.relay
    holds = relay is not None and relay._own is not None and bool(relay._own.diverged)
    # The process lives, and issues nothing that could tell the other rank.
    time.sleep(3)
    return type(caught.value).__name__, holds


def test_a_divergence_reaches_the_other_rank_also_if_it_is_reported_again() -> None:
    """The rank that has issued as many collectives raises, too, and does not wait for the group's timeout."""
    found = run_processes(2, _differs, pg_timeout=PATIENCE)
    assert {name for name, _ in found} <= {"MismatchError", "PeerError"}
    # Of the two, one may have found it, and the other be told.
    assert any(holds for _, holds in found)


def _reports_without_an_exception(comm: ProcessGroupCollectives) -> tuple[bool, bool]:
    """As `_differs`; what the program reports is a failure of which nobody knows the exception."""
    _steps(comm)
    group = ProcessGroupCollectives(dist.new_group())
    assert group.exchange(0) == [0, 0]
    with pytest.raises(CommError):
        for _ in range(2):
            if comm.rank == 0:
                group.all_reduce(torch.ones(3)).wait()
            else:
                group.all_gather(torch.empty(8), torch.ones(4)).wait()
    relay = _NOW.relay
    assert relay is not None
    before = relay._own
    tell_failure(None, "backward pass")
    after = relay._own
    return before is not None and bool(before.diverged), after is not None and "diverge" in after.message


def test_a_divergence_is_told_until_something_says_more() -> None:
    """A report without an exception, as of a frame that has ended, does not take the place of what says more."""
    found = run_processes(2, _reports_without_an_exception, pg_timeout=PATIENCE)
    # Of the two, one may have found it, and the other be told.
    assert any(diverged for diverged, _ in found)
    assert all(says for diverged, says in found if diverged)


def _exchanges_something_else(comm: ProcessGroupCollectives) -> None:
    topology = Topology(comm)
    with pytest.raises(CommError) as caught:
        if comm.rank == 0:
            topology.exchange(1, label="units")
        else:
            comm.exchange(1)
            comm.exchange(2, label="in vain")
    assert "the ranks are in different places" in str(caught.value)


def test_a_rank_that_got_what_it_asked_for_is_told() -> None:
    """Of two ranks that exchange different things, one may not notice: it is told when it waits for the other."""
    run_processes(2, _exchanges_something_else, pg_timeout=PATIENCE)


def _drops_one_and_is_slow(comm: ProcessGroupCollectives) -> None:
    os.environ["FLATPARAM_RELAY_FORGIVENESS"] = "600"
    _steps(comm)
    for attempt in range(2):
        if comm.rank == 1:
            try:
                with telling("evaluation"):
                    raise (Bug, ValueError)[attempt]("a bad batch")
            except (Bug, ValueError):
                pass
            # It loads the next batch, for longer than a rank waits for one that has failed.
            time.sleep(2.5)
        _steps(comm)


def test_a_program_that_drops_its_exception_may_be_slow() -> None:
    """A rank that catches an exception alone, forgets it, and loads data for seconds, is no failure."""
    run_processes(2, _drops_one_and_is_slow)


def _seconds(name: str, text: str, found: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(name, text)
        with pytest.warns(UserWarning, match=f"{name}: expected a number of seconds above 0, found '{text}'"):
            assert str(RelaySettings.read()) == found


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_settings_that_are_no_seconds(text: str) -> None:
    """A variable that holds no number of seconds is warned of, and the default stays."""
    for name in RelaySettings.variables():
        _seconds(name, text, str(RelaySettings()))


def test_the_environment_sets_each_number() -> None:
    """Each number has a variable."""
    for name, field in RelaySettings.variables().items():
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(name, "7.5")
            assert RelaySettings.read() == attrs.evolve(RelaySettings(), **{field: 7.5})


def _waits_elsewhere(comm: ProcessGroupCollectives, directory: str) -> None:
    """Rank 0, which passes the news on, is killed; rank 1 waits in a group without it, for a rank that never comes."""
    _steps(comm)
    pair = comm.subgroup([1, 2])
    if pair is not None:
        pair.barrier()
    _steps(comm)
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        assert pair is not None
        with pytest.raises(PeerError) as raised:
            pair.all_reduce(torch.ones(4), label="elsewhere").wait()
        Path(directory, "told").write_text(str(raised.value))
    while not Path(directory, "told").exists():
        time.sleep(0.05)


def test_a_rank_that_waits_elsewhere_is_told_of_the_end_of_rank_0(tmp_path: Path) -> None:
    """Without rank 0 nobody hears of anybody, so nobody goes on waiting in any group."""
    with pytest.raises(RankDied, match="rank 0 of 3"):
        run_processes(3, _waits_elsewhere, str(tmp_path), grace=PATIENCE)
    told = (tmp_path / "told").read_text()
    assert "rank 0 failed first with the end of its process" in told


def _goes_on_without_it(comm: ProcessGroupCollectives, directory: str, how: str) -> None:
    """Rank 2 ends; the others catch the error of the group with it, and train over their own."""
    _steps(comm)
    if how == "stays away":
        _NOW.relay.settings = attrs.evolve(RelaySettings(), idle=1.0)  # type: ignore[union-attr]
    pair = comm.subgroup([0, 1])
    if pair is None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        # The end of a program, as the others learn of it.
        _NOW.relay.tell_departure("it has ended its program")  # type: ignore[union-attr]
        while len(list(Path(directory).glob("rank-*"))) < 2:
            time.sleep(0.05)
        return
    pair.barrier()
    with pytest.raises(PeerError) as raised:
        comm.all_reduce(torch.ones(4), label="with it").wait()
    error = raised.value
    if how == "stays away" and comm.rank == 1:
        # It has caught the error, and does something else.
        while not Path(directory, "rank-0").exists():
            time.sleep(0.05)
        Path(directory, "rank-1").touch()
        return
    if how == "stays away":
        with pytest.raises(PeerError) as raised:
            pair.all_reduce(torch.ones(4), label="without it").wait()
        assert raised.value.rank == 2
    else:
        # Longer than others have mercy with a rank that has failed and does nothing, or take a wait for a vain one.
        settings = RelaySettings()
        time.sleep(settings.mercy + 0.5 + comm.rank * (2 * settings.stand + 0.5))
        for _ in range(2):
            _steps(pair)
            with pytest.raises(PeerError, match="is broken, since rank 2 failed first"):
                comm.barrier()
    Path(directory, f"rank-{comm.rank}").write_text(str(error))


@pytest.mark.parametrize("how", ["killed", "ends", "stays away"])
def test_a_group_without_the_rank_that_failed_goes_on(tmp_path: Path, how: str) -> None:
    """Trainers outlive a receiver: only the groups of the rank that failed are broken, unless one of them stays away."""
    if how == "killed":
        with pytest.raises(RankDied, match="rank 2 of 3"):
            run_processes(3, _goes_on_without_it, str(tmp_path), how, grace=PATIENCE)
    else:
        run_processes(3, _goes_on_without_it, str(tmp_path), how, grace=PATIENCE)
    assert "rank 2 failed first" in (tmp_path / "rank-0").read_text()
    assert (tmp_path / "rank-1").exists()


def _relays() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flatparam relay"]


def _switched_off(comm: ProcessGroupCollectives, how: str) -> int:
    if how == "variable":
        os.environ["FLATPARAM_RELAY"] = "0"
    else:
        set_relay(False)
    _steps(comm)
    return len(_relays())


@pytest.mark.parametrize("how", ["variable", "call"])
def test_it_can_be_switched_off(how: str) -> None:
    """With FLATPARAM_RELAY=0, or after set_relay(False), there is no thread, and collectives work as ever."""
    assert run_processes(2, _switched_off, how) == [0, 0]


def _end_group() -> None:
    """Leave the default group; on a busy machine its relay takes a little longer."""
    dist.destroy_process_group()
    until = time.monotonic() + PATIENCE
    while _relays() and time.monotonic() < until:
        time.sleep(0.01)


def _again_and_again(comm: ProcessGroupCollectives, directory: str) -> tuple[int, int, int]:
    _steps(comm)
    _end_group()
    server = dist.FileStore(str(Path(directory, "store")), comm.size)
    counts = []
    for turn in range(50):
        store = dist.PrefixStore(f"turn {turn}", server)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        _steps(ProcessGroupCollectives(), 1)
        assert len(_relays()) == 1
        _end_group()
        del store
        counts.append(len(os.listdir("/proc/self/fd")))
    # Every rank has left the last group.
    server.add("left", 1)
    while server.add("left", 0) < comm.size:
        time.sleep(0.01)
    keys = [key for key in server.list_keys() if "relay" in key]
    return len(_relays()), max(counts[5:]) - counts[5], len(keys)


@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="this torch cannot list the keys of a store")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell the open descriptors")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A process that joins and leaves 50 process groups has no thread, descriptor or key more than after the first."""
    assert run_processes(2, _again_and_again, str(tmp_path)) == [(0, 0, 0)] * 2


def _is_kept(comm: ProcessGroupCollectives, directory: str) -> None:
    kept = dist.group.WORLD if comm.rank == 0 else None
    _steps(comm)
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(directory, "store")), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    again = ProcessGroupCollectives()
    for _ in range(3):
        again.all_reduce(torch.ones(7, dtype=torch.float64), label="something else").wait()
    assert len(_relays()) == 1
    del kept


def test_a_group_that_something_keeps_after_its_end(tmp_path: Path) -> None:
    """If a traceback, say, keeps a destroyed default group on one rank, the next one begins anew on all ranks."""
    run_processes(2, _is_kept, str(tmp_path))


def _forks(comm: ProcessGroupCollectives) -> int:
    _steps(comm)
    child = os.fork()
    if child == 0:
        tell_failure(Bug("in a child"), is_final=True)
        set_relay(False)
        os._exit(len(_relays()))
    _, status = os.waitpid(child, 0)
    for _ in range(3):
        _steps(comm)
        time.sleep(0.3)
    _steps(comm)
    assert len(_relays()) == 1
    return os.waitstatus_to_exitcode(status)


def test_a_forked_process_tells_nothing() -> None:
    """A failure in a process that a rank has forked is none of the rank's, whose own relay goes on."""
    assert run_processes(2, _forks) == [0, 0]


def _loses_its_store(comm: ProcessGroupCollectives, directory: str) -> None:
    dist.destroy_process_group()
    port = Path(directory, "port")
    if comm.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, comm.size, is_master=True, wait_for_workers=False)
        Path(directory, "written").write_text(str(server.port))
        Path(directory, "written").rename(port)
    while not port.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    group = ProcessGroupCollectives()
    _steps(group)
    # The processes know each other.
    time.sleep(1)
    group.barrier()
    if comm.rank == 0:
        del server
    time.sleep(1)
    _steps(group)
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as raised:
        group.all_reduce(torch.ones(1000), label="the next step").wait()
    Path(directory, "told").write_text(f"{type(raised.value).__name__}: {raised.value}")


def test_a_store_that_goes_away_harms_nobody(tmp_path: Path) -> None:
    """Without its store the relay still sees a process of this host end, and a healthy step goes on."""
    with pytest.raises(RankDied, match="rank 0 of 2 was killed by SIGKILL"):
        run_processes(2, _loses_its_store, str(tmp_path), grace=PATIENCE)
    told = (tmp_path / "told").read_text()
    # The rank may have learnt of the end before it has issued the collective, or while it waits for it.
    prefix = "PeerError: rank 1: all_reduce 'the next step': "
    broken = "the process group is broken, since "
    assert told.startswith(prefix), told
    assert told.removeprefix(prefix).removeprefix(broken).startswith("rank 0 failed first with the end of"), told


def _is_stopped(comm: ProcessGroupCollectives, directory: str) -> None:
    group = ProcessGroupCollectives(dist.new_group(timeout=timedelta(seconds=BRIEFLY)))
    _steps(group)
    pids = comm.exchange(os.getpid())
    if comm.rank == 1:
        # The other rank wakes this one.
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    try:
        with pytest.raises(CollectiveError) as raised:
            group.all_reduce(torch.ones(1000), label="the next step").wait()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    told = f"not there: rank 1 (process {pids[1]}, which is stopped), whose last collective was all_reduce 'step 2'"
    assert told in str(raised.value), raised.value


def test_a_rank_that_is_stopped_is_named_at_the_timeout(tmp_path: Path) -> None:
    """A rank that a signal or a debugger stops is waited for until the timeout, whose error names it and its state."""
    run_processes(2, _is_stopped, str(tmp_path))


def _uses_it_in_a_child(comm: ProcessGroupCollectives, through: str) -> int:
    collectives = shared_memory(comm) if through == "shared memory" else comm
    collectives.barrier()
    child = os.fork()
    if child == 0:
        try:
            collectives.all_reduce(torch.ones(10), label="in a worker").wait()
        except CommError as error:
            os._exit(0 if "found one forked from it" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    collectives.all_reduce(torch.ones(10)).wait()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("through", ["gloo", "shared memory"])
def test_a_forked_process_is_refused(through: str) -> None:
    """A collective in a forked process is an error at once, and its parent's collectives go on."""
    assert run_processes(2, _uses_it_in_a_child, through) == [0, 0]


class _Writes(logging.Handler):
    """Writes the first message to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(record.getMessage())
        part.rename(self.path)


def _stalls(comm: ProcessGroupCollectives, directory: str) -> None:
    os.environ["FLATPARAM_RELAY_STALL"] = "0.2"
    warning = Path(directory, "warning")
    logging.getLogger("flatparam_guard").addHandler(_Writes(warning if comm.rank == 0 else Path(directory, "other")))
    _steps(comm)
    if comm.rank == 1:
        deadline = time.monotonic() + PATIENCE
        while not warning.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    comm.all_reduce(torch.ones(1000), label="the next step").wait()


def test_ranks_that_stay_at_different_collectives_are_listed(tmp_path: Path) -> None:
    """The rank that is ahead warns of what each rank has issued last; nothing is raised, and the ranks go on."""
    run_processes(2, _stalls, str(tmp_path), pg_timeout=PATIENCE)
    told = (tmp_path / "warning").read_text()
    assert "rank 0 has issued 4, the last all_reduce 'the next step', 4,000 bytes, before the first" in told
    assert "; rank 1 has issued 3, the last all_reduce 'step 2', 4,000 bytes, before the first" in told
    assert "what is behind, [1], computes, loads data" in told
    assert not (tmp_path / "other").exists()


def _is_interrupted(comm: ProcessGroupCollectives, directory: str) -> None:
    """Rank 1 gets Ctrl-C when the first half of an exchange is sent, and lives, as a notebook does."""
    comm.exchange("begin")
    told = Path(directory, "told")
    if comm.rank == 0:
        with pytest.raises(PeerError, match="rank 1 failed first in saving .* with KeyboardInterrupt"):
            comm.exchange("the second one", label="the next")
        told.touch()
        return
    both = iter([groups.all_gather])

    def half(*args: object) -> object:
        for gather in both:
            return gather(*args)
        raise KeyboardInterrupt

    groups.all_gather = half
    with pytest.raises(KeyboardInterrupt), telling("saving"):
        comm.exchange("the second one", label="the next")
    until = time.monotonic() + PATIENCE
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert told.exists(), "rank 0 waits"


def test_an_interrupt_in_the_middle_of_an_exchange_is_told(tmp_path: Path) -> None:
    """Who waits for the other half is told of Ctrl-C, while the interrupted process lives."""
    run_processes(2, _is_interrupted, str(tmp_path), grace=PATIENCE)
    assert (tmp_path / "told").exists()


SLOW_TO_END = '''
import time
from datetime import timedelta
from torch.distributed import TCPStore
from flatparam_guard.relay import Relay
from flatparam_guard.relay_settings import RelaySettings

class SlowStore:
    def __init__(self):
        self.store = TCPStore("localhost", 0, is_master=True)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def delete_key(self, key):
        self.store.wait(["never"], timedelta(seconds=1))

class Late:
    """Ends after all else, and lets other threads run."""

    def __del__(self, sleep=time.sleep):
        sleep(2)

late = Late()
relay = Relay(0, 2, SlowStore(), RelaySettings(flush=0.05))
relay.start()
while not relay.secret:
    time.sleep(0.01)
relay.end()
'''


@pytest.mark.processes
def test_python_does_not_end_while_the_thread_is_inside_of_torch() -> None:
    """It waits for a last call of the store that is slow; else it would abort the process, which has done its work."""
    done = subprocess.run([sys.executable, "-c", SLOW_TO_END], timeout=PATIENCE, check=False)
    assert done.returncode == 0
