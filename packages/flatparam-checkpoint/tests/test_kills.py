"""kill -9 at each moment of a save, and at random ones: no checkpoint is lost, none is half, training goes on."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from flatparam_files import Moment, open_checkpoint, verify_checkpoint

from .beneath import KillAtCall, end_of, fork
from .small import KillAt, SmallRun, same

RANDOM_KILLS = int(os.environ.get("FLATPARAM_RANDOM_KILLS", "200"))

CALLS_OF_A_SAVE = 10_000
"""Roughly, of the five steps before it, and of resuming too."""

BEFORE_THE_COMMIT = [*list(Moment)[: list(Moment).index(Moment.RENAMED)]]


def uninterrupted(tmp_path: Path, steps: int) -> list[torch.Tensor]:
    """The numbers of a run that nobody killed."""
    run = SmallRun(tmp_path / "uninterrupted")
    run.train(steps)
    run.checkpointer.close()
    return run.state()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name)
def test_killed_at_each_moment(moment: Moment, asynchronous: bool, tmp_path: Path) -> None:
    """The checkpoint before (or, once it has its name, the new one) loads; the next run ends bit-identical."""
    root = tmp_path / "run"

    def work() -> None:
        kill = KillAt(moment, armed=False)
        run = SmallRun(root, keep=2, asynchronous=asynchronous, on_moment=kill)
        run.train(15)
        run.checkpointer.wait()
        kill.armed = True
        run.train(20)
        run.checkpointer.close()

    assert end_of(fork(work)) == -signal.SIGKILL
    assert verify_checkpoint(root).is_sound
    with open_checkpoint(root) as reader:
        assert reader.manifest.step == (15 if moment in BEFORE_THE_COMMIT else 20)
    run = SmallRun(root, keep=2)
    run.resume()
    run.train(30)
    assert same(run.state(), uninterrupted(tmp_path, 30))
    assert run.checkpointer.steps() == [25, 30]
    assert sorted(path.name for path in root.iterdir()) == [
        "latest",
        "lock",
        "step-00000025",
        "step-00000030",
    ]
    run.checkpointer.close()


@pytest.mark.parametrize("kills", [RANDOM_KILLS // 20, pytest.param(RANDOM_KILLS, marks=pytest.mark.long)])
def test_killed_at_random(kills: int, tmp_path: Path) -> None:
    """Each time the latest checkpoint is whole, nothing that was saved is lost, and all kills later the run is the same.

    A kill comes at a call that is drawn at random, of three saves and what is between, however long calls take.
    """
    root, generator = tmp_path / "run", random.Random(5)
    uninterrupted(tmp_path / "before", 10)  # imports what is imported late, which is no run's work
    total, lost, step, within = 40 * kills, 0, 0, 0
    progress = tmp_path / "progress"

    def work(kill: KillAtCall) -> None:
        kill.start()
        run = SmallRun(root, keep=2)
        run.resume()
        progress.write_text(f"{run.step}")
        while run.step < total:
            run.train(run.step + 5)
            progress.write_text(f"{run.step}")

    for _ in range(kills):
        kill = KillAtCall(generator.randrange(1, 4 * CALLS_OF_A_SAVE))
        assert end_of(fork(lambda kill=kill: work(kill))) == -signal.SIGKILL  # type: ignore[misc]
        if root.exists():
            within += any("." in path.name for path in root.iterdir())
        if (root / "latest").exists():
            report = verify_checkpoint(root)
            assert report.is_sound
            assert report.step >= step
            said = int(progress.read_text() or 0) if progress.exists() else 0
            lost = max(lost, said - report.step)
            step = report.step
    assert lost == 0, "a step was said to be saved, and is not there"
    assert step > 0
    assert within >= kills // 20, "hardly any kill came within a save"
    run = SmallRun(root, keep=2)
    run.resume()
    run.train(run.step + 5)
    run.checkpointer.close()
    assert same(run.state(), uninterrupted(tmp_path, run.step))
