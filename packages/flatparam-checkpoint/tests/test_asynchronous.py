"""Saving beside training: what was staged is what is saved, and a failure is told at the next call."""

import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_checkpoint import Checkpointer
from flatparam_checkpoint.save.contribution import Contribution
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives
from flatparam_comm.testing import PATIENCE, run_processes, run_threads
from flatparam_files import CheckpointError, Moment, open_checkpoint, verify_checkpoint

from .beneath import AllocatedBytes, Setup, assert_equal_state, full_state
from .runs import resumed
from .small import ALONE, SmallRun

SETUP = Setup(2)


class Gate:
    """Holds the writer at the first moment that it meets, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, moment: Moment) -> None:
        if moment is Moment.FILE_OPENED:
            self.reached.set()
            assert self.opened.wait(PATIENCE)


@each_row("use_orig_params", [False, True])
def test_training_goes_on_while_it_is_written(use_orig_params: bool, tmp_path: Path) -> None:
    """The writer is held until parameters, optimizer and extra have changed: the values of the call are saved."""
    setup = Setup(2, use_orig_params=use_orig_params)

    def run(world: Collectives) -> Any:
        model, optimizer = setup.build(world)
        setup.train(model, optimizer, range(3))
        gate = Gate()
        expected = full_state(model, optimizer)
        extra = {"order": torch.arange(3)}
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=True, on_moment=gate)
        checkpointer.save(3, extra=extra)
        assert gate.reached.wait(PATIENCE)
        setup.train(model, optimizer, range(3, 6))
        extra["order"].zero_()
        assert checkpointer.steps() == []
        gate.opened.set()
        checkpointer.wait()
        assert checkpointer.steps() == [3]
        checkpointer.close()
        return expected

    expected = run_threads(2, run)[0]
    for now, _, loaded in resumed(setup, tmp_path):
        assert_equal_state(now, expected)
        assert torch.equal(loaded.extra["order"], torch.arange(3))


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """Ten saves without a pause, by two ranks: each is committed, in order, and whole."""

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        with Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=True) as checkpointer:
            for step in range(10):
                SETUP.train(model, optimizer, [step])
                checkpointer.save(step)
                assert checkpointer.steps() in (list(range(step)), list(range(step + 1)))

    run_threads(2, run)
    for step in range(10):
        assert verify_checkpoint(tmp_path / f"step-{step:08d}").is_sound


@each_row("call", ["save", "wait", "close", "load"])
def test_a_failure_surfaces_at_the_next_call(call: str, tmp_path: Path) -> None:
    """Whichever it is, on every rank, once; then all is as if that save had not been."""

    def fail(moment: Moment) -> None:
        if moment is Moment.MANIFEST_WRITTEN and armed:
            armed.clear()
            raise RuntimeError("cosmic ray")

    armed: list[int] = []

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=True, on_moment=fail)
        checkpointer.save(1)
        checkpointer.wait()
        armed.append(1)
        checkpointer.save(2)
        action = {
            "save": lambda: checkpointer.save(3),
            "wait": checkpointer.wait,
            "close": checkpointer.close,
        }
        with pytest.raises(CheckpointError, match="rank 0: RuntimeError: cosmic ray|rank 0: cosmic ray"):
            action.get(call, checkpointer.load)()
        world.barrier()
        assert checkpointer.steps() == [1]
        world.barrier()
        armed.clear()
        checkpointer.save(2)
        checkpointer.close()

    run_threads(2, run)
    assert verify_checkpoint(tmp_path).step == 2


def test_leaving_with_an_error_finishes_what_can_be_finished(tmp_path: Path) -> None:
    """An exception in the training loop: the save under way is committed, the exception comes out, the lock is free."""
    with pytest.raises(ZeroDivisionError):
        with SmallRun(tmp_path, asynchronous=True).checkpointer as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError
    assert verify_checkpoint(tmp_path).step == 1
    SmallRun(tmp_path).checkpointer.save(2)


def test_memory_and_traffic(tmp_path: Path) -> None:
    """A save moves no byte of a tensor between ranks; it takes the staging buffer, or, beside training, what is owned."""
    setup = Setup(2, use_orig_params=True)
    owned: dict[int, int] = {}

    def run(world: Collectives) -> None:
        ledger = ByteLedger()
        recorded = RecordingCollectives(world, ledger)
        model, optimizer = setup.build(recorded)
        setup.train(model, optimizer, range(2))
        ledger.reset()
        for asynchronous in (False, True):
            checkpointer = Checkpointer(
                tmp_path / str(asynchronous), model, optimizer, ranks=recorded, asynchronous=asynchronous
            )
            with AllocatedBytes() as allocated:
                checkpointer.save(1)
            checkpointer.close()
            shapes = open_checkpoint(tmp_path / str(asynchronous)).manifest.files[world.rank]
            owned[world.rank] = shapes.nbytes - shapes.header_nbytes
            assert allocated.peak <= (owned[world.rank] if asynchronous else 0) + 2**10
        assert ledger.total.count == 0

    run_threads(2, run)
    big = torch.nn.Linear(4096, 4096)  # 64 MiB
    tracemalloc.start()
    try:
        with Checkpointer(tmp_path / "big", big, ranks=ALONE) as checkpointer:
            checkpointer.save(1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20 + 2**19, "the staging buffer, and small things"


def _real_processes(world: Collectives, root: str) -> tuple[list[int], int]:
    model, optimizer = SETUP.build(world)
    SETUP.train(model, optimizer, range(2))
    with Checkpointer(root, model, optimizer, keep=2, asynchronous=True) as checkpointer:
        for step in range(4):
            checkpointer.save(step, rank_extra=world.rank)
        checkpointer.wait()
        loaded = checkpointer.load()
    assert loaded is not None
    return checkpointer.steps(), loaded.rank_extra


@pytest.mark.processes
def test_real_processes(tmp_path: Path) -> None:
    """Over gloo the same: ranks by default all, saves in the background, two kept, each rank's own extra."""
    assert run_processes(2, _real_processes, str(tmp_path)) == [([2, 3], 0), ([2, 3], 1)]


ENDLESS = """
from flatparam_checkpoint.save.background import Background
Background(lambda own_part, cancelled: cancelled.wait({seconds}), "a save that waits for a dead rank")
raise SystemExit(7)
"""


def test_a_failing_program_ends(tmp_path: Path) -> None:
    """A program that fails without closing its checkpointer does not wait for other ranks for ever."""
    assert (
        subprocess.run([sys.executable, "-c", ENDLESS.format(seconds=4 * PATIENCE)], timeout=PATIENCE).returncode == 7
    )


@pytest.mark.parametrize("call", ["save", "wait", "close", "load"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_memory_to_stage_on_one_rank(rank: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `save` returns on every rank, the next call raises on every rank and says which one, and the next save works."""
    staged, armed = Contribution.staged, threading.local()

    def fail(self: Contribution) -> Contribution:
        if getattr(armed, "now", False):
            armed.now = False
            raise MemoryError
        return staged(self)

    monkeypatch.setattr(Contribution, "staged", fail)

    def run(world: Collectives) -> str:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=True)
        checkpointer.save(1)
        checkpointer.wait()
        armed.now = world.rank == rank
        assert checkpointer.save(2) == tmp_path / "step-00000002"
        action = {"save": lambda: checkpointer.save(3), "load": checkpointer.load}
        with pytest.raises(CheckpointError) as caught:
            action.get(call, getattr(checkpointer, call))()
        assert caught.value.rank == rank
        world.barrier()
        assert checkpointer.steps() == [1]
        world.barrier()
        checkpointer.save(2)
        checkpointer.close()
        return str(caught.value)

    assert run_threads(2, run) == [f"rank {rank}: MemoryError"] * 2
    assert verify_checkpoint(tmp_path).step == 2


def test_a_failure_that_an_exception_hides(tmp_path: Path) -> None:
    """If the program leaves with an exception, a save under way that fails is warned about."""

    def fail(moment: Moment) -> None:
        if moment is Moment.FILE_OPENED:
            raise RuntimeError("cosmic ray")

    def leave() -> None:
        with SmallRun(tmp_path, asynchronous=True, on_moment=fail).checkpointer as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            leave()
    assert [str(each.message) for each in told] == ["a checkpoint was not saved: cosmic ray"]


SURVIVOR = """
import shutil, sys, time
from pathlib import Path
from flatparam_comm import ForwardingCollectives, SingleCollectives
from flatparam_checkpoint import Checkpointer
from flatparam_files.checkpoint.rank_part import Ticket

root, rank, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
temporary = root / ("step-00000001.tmp-" + "0" * 32)


class OneOfTwo(ForwardingCollectives):
    rank, size = rank, 2

    def exchange(self, value, *, label=""):
        if rank == 1 and label == "begin to save":
            return [(None, (Ticket(1, "0" * 32, None, temporary), *value[1][1:])), value]
        return [value, value]

    def barrier(self, *, label=""):
        pass

    def _decorate(self, inner):
        return self


checkpointer = Checkpointer(root, ranks=OneOfTwo(SingleCollectives()), asynchronous=True)
checkpointer.save(1, extra=1)
if end == "committed":
    while not (temporary / "rank-00001.done").exists():
        time.sleep(0.01)
    shutil.rmtree(temporary)
"""


@pytest.mark.parametrize(
    ("rank", "end", "code", "said"),
    [
        (0, "its peer has died", 1, "rank 1 has not written its part"),
        pytest.param(1, "its peer has died", 1, "rank 0 has not committed it", marks=pytest.mark.long),
        pytest.param(1, "committed", 0, "", marks=pytest.mark.long),
    ],
)
def test_the_survivor_of_a_save_does_not_exit_with_0(rank: int, end: str, code: int, said: str, tmp_path: Path) -> None:
    """A program that ends with a save under way, whose other rank is gone, says so and ends with an exit code of 1."""
    command = [sys.executable, "-c", SURVIVOR, str(tmp_path), str(rank), end]
    found = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True)
    assert (found.returncode, said in found.stderr) == (code, True), found.stderr
    assert ("was not saved" in found.stderr) == bool(code)
