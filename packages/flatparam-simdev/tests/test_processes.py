"""The world of processes for tests: results, errors, deaths, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from flatparam_comm import (
    CollectiveError,
    Collectives,
    RankDied,
    RankError,
    WorldTimeout,
)
from flatparam_comm.testing import PATIENCE, Fault, FaultyCollectives, Kill, longer_and_longer, run_processes
from flatparam_simdev.worlds import child as process_child
from flatparam_simdev.worlds import process_world as processes
from flatparam_simdev.worlds.child import FunctionReference

pytestmark = pytest.mark.processes


@attrs.frozen
class Parcel:
    """A class of this very module, which the child must find to unpickle it."""

    number: int


def _echo(comm: Collectives, parcel: Parcel, tensor: torch.Tensor) -> Any:
    assert torch.get_num_threads() == 1
    return os.getpid(), comm.rank, Parcel(parcel.number + comm.rank), tensor + comm.rank


def test_results_come_back_in_rank_order() -> None:
    """Arguments and results travel by pickle, classes of the test module and tensors too; each rank is a process."""
    results = run_processes(2, _echo, Parcel(5), torch.ones(3))
    pids = {pid for pid, *_ in results}
    assert len(pids | {os.getpid()}) == 3
    assert [rank for _, rank, *_ in results] == [0, 1]
    assert [parcel for *_, parcel, _ in results] == [Parcel(5), Parcel(6)]
    assert [tensor.tolist() for *_, tensor in results] == [[1.0] * 3, [2.0] * 3]


def _backward(comm: Collectives) -> float:
    weight = torch.ones(8, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    total = weight.grad.clone()
    comm.all_reduce(total).wait()
    return float(total[0])


def test_children_can_run_backward_after_the_parent_did() -> None:
    """A parent that has run backward passes can still have children that do (a plain fork would hang)."""
    torch.ones(2, requires_grad=True).sum().backward()
    assert run_processes(2, _backward) == [4.0, 4.0]


def _fail(comm: Collectives) -> None:
    if comm.rank == 1:
        raise ValueError("no such layer")
    comm.barrier(label="end")


def test_a_childs_exception_comes_with_its_traceback() -> None:
    """RankError names the rank that failed by itself and has its traceback; what others saw is told beside it."""
    with pytest.raises(RankError, match="rank 1 of 2 failed with ValueError: no such layer") as raised:
        run_processes(2, _fail)
    assert raised.value.rank == 1
    assert "in _fail" in raised.value.remote_traceback
    assert "Error: rank 0: barrier 'end': " in str(raised.value)
    _assert_nothing_left()


def _killed(comm: Collectives) -> None:
    faulty = FaultyCollectives(comm, [Fault("all_reduce", "grad*", rank=1, nth=1, action=Kill())])
    for step in range(3):
        faulty.all_reduce(torch.zeros(4), label=f"gradient {step}").wait()


def _exits(comm: Collectives) -> None:
    if comm.rank == 0:
        os._exit(3)
    comm.barrier()


def _crashes(comm: Collectives) -> None:
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    comm.barrier()


def test_a_killed_child_is_told_from_one_that_failed() -> None:
    """A rank that dies is a RankDied with the signal, or with the exit code, and with where it crashed."""
    with pytest.raises(RankDied, match="rank 1 of 2 was killed by SIGKILL before it had a result") as raised:
        run_processes(2, _killed)
    assert (raised.value.rank, raised.value.signal, raised.value.exitcode) == (1, "SIGKILL", -signal.SIGKILL)
    with pytest.raises(RankDied, match=r"(?s)rank 1 of 2 was killed by SIGABRT .* in _crashes"):
        run_processes(2, _crashes)
    with pytest.raises(RankDied, match="rank 0 of 2 ended with exit code 3") as raised:
        run_processes(2, _exits)
    assert (raised.value.rank, raised.value.signal, raised.value.exitcode) == (0, "", 3)
    _assert_nothing_left()


def _hang(comm: Collectives) -> None:
    if comm.rank == 1:
        time.sleep(10 * PATIENCE)
    comm.barrier(label="end")


def test_a_timeout_shows_where_each_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout every process is killed and the error has the stack of each rank that was not done."""
    for limit in longer_and_longer(1):
        monkeypatch.setattr(processes, "_STACKS_SECONDS", limit / 4)
        with pytest.raises(WorldTimeout, match=f"run_processes: not done after {limit} s") as raised:
            run_processes(2, _hang, timeout=limit)
        _assert_nothing_left()
        # The ranks had got this far by then.
        if "in barrier" in str(raised.value) and "in _hang" in str(raised.value):
            break
    assert re.search("rank 0 is still running:.*in barrier", str(raised.value), re.DOTALL)
    assert re.search("rank 1 is still running:.*in _hang", str(raised.value), re.DOTALL)


def test_a_collective_that_times_out_shows_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank's collective times out because another hangs, the error has the stack of the one that hangs."""
    for limit in longer_and_longer(0.5):
        monkeypatch.setattr(processes, "_STACKS_SECONDS", limit / 2)
        monkeypatch.setattr(processes, "_GRACE_SECONDS", limit)
        with pytest.raises(RankError) as raised:
            run_processes(2, _hang, pg_timeout=limit)
        if "in _hang" in str(raised.value) and "barrier 'end'" in str(raised.value):
            break
    assert str(raised.value).startswith("rank 0 of 2 failed with CollectiveError: rank 0: barrier 'end'")
    assert re.search("rank 1 is still running:.*in _hang", str(raised.value), re.DOTALL)


def _destroys(comm: Collectives) -> int:
    torch.distributed.destroy_process_group()
    return 1


def test_a_function_may_destroy_the_group_itself() -> None:
    """A function that has ended its group has a result like any other."""
    assert run_processes(2, _destroys) == [1, 1]


def _many_bytes(comm: Collectives) -> bytes:
    return bytes(3_000_000)


def test_results_may_be_large() -> None:
    """A result larger than any pipe's buffer comes back."""
    assert [len(result) for result in run_processes(2, _many_bytes)] == [3_000_000] * 2


def test_functions_that_cannot_be_found_again_are_refused() -> None:
    """Lambdas and inner functions are a ValueError that says what to do, before any process is started."""

    def inner(comm: Collectives) -> None:
        raise NotImplementedError

    for fn in (inner, lambda comm: None):
        with pytest.raises(ValueError, match=r"expected a function at the top level of a module, found .*move it out"):
            run_processes(2, fn)
    with pytest.raises(ValueError, match="found world_size=0"):
        run_processes(0, _backward)


def test_modules_that_only_a_file_knows_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    """A function is found by its file when its module's name cannot be imported, and pickle finds its classes, too."""
    file = tmp_path / "ghost.py"
    file.write_text(
        textwrap.dedent(
            """
            import neighbour
            class Thing: pass
            def make(*args): return Thing, neighbour.VALUE
            """
        )
    )
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("house", "house.of-ghosts", "house.of-ghosts.ghost", "neighbour"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    thing, value = FunctionReference("house.of-ghosts.ghost", str(file), "make").resolve()()
    assert value == 7
    assert pickle.loads(pickle.dumps(thing)) is thing
    for name in ("house", "house.of-ghosts", "house.of-ghosts.ghost", "neighbour"):
        monkeypatch.delitem(sys.modules, name)


def test_modules_that_can_be_imported_are() -> None:
    """A function of an installed module is resolved to that very function."""
    reference = FunctionReference.of(run_processes)
    assert reference.module == "flatparam_simdev.worlds.process_world"
    assert reference.resolve() is run_processes


def _assert_nothing_left() -> None:
    assert multiprocessing.active_children() == []


def test_a_rank_that_cannot_join_does_not_take_the_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is not made counts as a consequence: the rank that broke it names its own error."""

    def closed(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(process_child.dist, "init_process_group", closed)
    plan = process_child.ChildPlan(0, 2, FunctionReference.of(_fail), b"", "/nowhere", 1.0)
    with pytest.raises(CollectiveError, match="rank 0: init_process_group: Connection closed by peer") as raised:
        process_child._join(plan)
    assert process_child._report(raised.value).is_consequence


def test_functions_of_modules_without_a_file() -> None:
    """A function of a module without a file, such as one that is built in, is found by the module's name."""
    reference = FunctionReference.of(len)
    assert (reference.module, reference.file) == ("builtins", None)
    assert reference.resolve() is len
    with pytest.raises(ImportError):
        FunctionReference("no_such_module", None, "run").resolve()


def test_a_file_that_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function whose module is no Python source file any more is refused with the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "notes.txt"
    file.write_text("nothing to import")
    with pytest.raises(ImportError, match=r"expected a Python source file, found .*notes\.txt"):
        FunctionReference("notes", str(file), "run").resolve()


def test_a_module_of_the_same_name_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the same name that comes from a different file does not stand in for the function's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "double", types.ModuleType("double"))
    file = tmp_path / "double.py"
    file.write_text("def run(): return 'the right one'\n")
    assert FunctionReference("double", str(file), "run").resolve()() == "the right one"
