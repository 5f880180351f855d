"""Under load: a save after every step, with a reader that verifies all the time; ranks that die in real processes."""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives, ForwardingCollectives, SingleCollectives
from flatparam_files import CheckpointError, Moment, OnMoment, open_checkpoint, verify_checkpoint

from .beneath import KillAtCall, end_of, fork
from .small import ALONE, KillAt, SmallRun

SAVES = int(os.environ.get("FLATPARAM_SAVES", "500"))


@pytest.mark.long
def test_every_latest_can_be_loaded_while_saves_go_on(tmp_path: Path) -> None:
    """500 saves, three kept, and another process that verifies the latest over and over: all are sound, steps grow.

    A checkpoint may be retired while it is being read; then the reader opens the latest again. Where the reader is slow,
    saves go on, ever more slowly, until it has seen some.
    """
    root = tmp_path / "run"
    SmallRun(root).checkpointer.save(0)
    done, enough = tmp_path / "done", tmp_path / "enough"

    def read() -> None:
        step, seen = -1, 0
        while not done.exists():
            try:
                report = verify_checkpoint(root)
            except CheckpointError as error:
                assert "No such file" in str(error) or "cannot be opened" in str(error), error
                continue
            if not report.is_sound:  # what was the latest when it was chosen has been retired
                assert any("No such file" in problem for problem in report.problems), report
                continue
            assert report.step >= step
            seen += report.step > step
            step = report.step
            if seen == 10:
                enough.touch()

    reader = fork(read)
    run = SmallRun(root, keep=3)
    while run.step < SAVES or not enough.exists():
        run.train(run.step + 1, every=1)
        time.sleep(max(0, run.step - SAVES) * 0.01)  # ever more slowly, until the reader can keep up
        assert os.waitpid(reader, os.WNOHANG) == (0, 0), "the reader has failed"
    run.checkpointer.close()
    done.touch()
    assert end_of(reader) == 0
    assert run.checkpointer.steps() == [run.step - 2, run.step - 1, run.step]


class PipeRanks(ForwardingCollectives):
    """Two ranks in forked processes that talk through a pipe; only what a checkpoint needs."""

    def __init__(self, rank: int, link: Connection) -> None:
        super().__init__(SingleCollectives())
        self._rank, self._link = rank, link

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return 2

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        self._link.send(value)
        values = [value, self._link.recv()]  # EOFError where the other one has died
        return values if self._rank == 0 else values[::-1]

    def barrier(self, *, label: str = "") -> None:
        self.exchange(None)

    def _decorate(self, inner: Collectives) -> Collectives:
        return self


def two_ranks(root: Path, killed: int, kill: KillAt | KillAtCall, asynchronous: bool) -> list[int]:
    """Two processes that save tensors of their own until `kill` ends rank `killed`; returns their exit codes."""
    links = multiprocessing.Pipe()

    def work(rank: int) -> None:
        links[1 - rank].close()
        ranks = PipeRanks(rank, links[rank])
        on_moment: OnMoment = kill if isinstance(kill, KillAt) and rank == killed else (lambda moment: None)
        if isinstance(kill, KillAtCall) and rank == killed:
            kill.start()
        checkpointer = Checkpointer(root, ranks=ranks, keep=2, asynchronous=asynchronous, on_moment=on_moment)
        try:
            loaded = checkpointer.load()
            step = 0 if loaded is None else loaded.step
            if loaded is not None:
                assert torch.equal(loaded.rank_extra, values(rank, step))
                assert loaded.extra == step
            while True:
                step += 1
                checkpointer.save(step, extra=step, rank_extra=values(rank, step))
        except (EOFError, OSError):  # the other one is gone: this is what a process group says
            checkpointer.__exit__(EOFError, None, None)
            os._exit(3)

    pids = [fork(lambda rank=rank: work(rank)) for rank in range(2)]  # type: ignore[misc]
    for link in links:
        link.close()
    return [end_of(pid) for pid in pids]


def values(rank: int, step: int) -> torch.Tensor:
    """What `rank` saves at `step`."""
    return torch.full((1000,), rank * 1000.0 + step)


def check_whole(root: Path) -> int:
    """That the latest checkpoint is of one step on both ranks; returns the step."""
    assert verify_checkpoint(root).is_sound
    with open_checkpoint(root) as reader:
        step = reader.manifest.step
        for rank in range(2):
            assert torch.equal(reader.load(f"rank_extra/{rank}"), values(rank, step))
    return step


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [Moment.FILE_OPENED, Moment.PIECE_WRITTEN, Moment.FILE_SYNCED, Moment.REPORTED])
def test_a_rank_dies_while_it_writes(moment: Moment, rank: int, asynchronous: bool, tmp_path: Path) -> None:
    """Two processes; one dies at its third save: the second checkpoint loads on both ranks, and the run goes on."""
    kill = KillAt(moment, 3)
    codes = two_ranks(tmp_path, rank, kill, asynchronous)
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 3
    step = check_whole(tmp_path)
    finished = asynchronous and rank == 1 and moment is Moment.REPORTED  # rank 0 needs it no more
    assert step in ((2, 3) if finished else (2,))
    two_ranks(tmp_path, rank, KillAt(moment, 5), asynchronous)
    assert check_whole(tmp_path) > step


@pytest.mark.long
def test_ranks_die_at_random(tmp_path: Path) -> None:
    """30 times, either rank, in the background or not: what is loaded is of one step, and steps never go back.

    A rank is killed at a call that is drawn at random, of some six saves and the load before them.
    """
    with Checkpointer(tmp_path / "before", ranks=ALONE) as checkpointer:
        checkpointer.save(1)  # imports what is imported late, which is no rank's work
    root, step, generator = tmp_path / "run", 0, random.Random(5)
    for number in range(30):
        kill = KillAtCall(generator.randrange(1, 20_000))
        codes = two_ranks(root, number % 2, kill, number % 3 == 0)
        assert codes[number % 2] == -signal.SIGKILL
        assert codes[1 - number % 2] == 3
        if (root / "latest").exists():
            now = check_whole(root)
            assert now >= step
            step = now
    assert step > 5
