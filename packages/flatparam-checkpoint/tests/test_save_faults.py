"""Where a save fails, every rank says the same, what was there before is as it was, and training goes on."""

import errno
import gc
import os
import resource
import socket
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from each_row import each_row

from flatparam_checkpoint import Checkpointer
from flatparam_checkpoint.save.after_failure import _WATCHES, StepWatch
from flatparam_checkpoint.save.subject import Subject
from flatparam_comm import Collectives, RankError
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError, Moment, open_checkpoint, verify_checkpoint
from flatparam_files.checkpoint.directory import CheckpointDirectory
from flatparam_runtime import summon_full_params

from .beneath import Setup, assert_equal_state, end_of, fork, full_state
from .small import ALONE, SmallRun

SETUP = Setup(2)
ON_EVERY_RANK = [Moment.FILE_OPENED, Moment.PIECE_WRITTEN, Moment.FILE_SYNCED, Moment.REPORTED]


class FailAt:
    """Raises what a full disk raises, at a moment, once."""

    def __init__(self, moment: Moment) -> None:
        self.moment, self.armed = moment, False

    def __call__(self, moment: Moment) -> None:
        if self.armed and moment is self.moment:
            self.armed = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ON_EVERY_RANK, ids=lambda moment: moment.name)
def test_a_full_disk_on_one_rank(moment: Moment, rank: int, asynchronous: bool, tmp_path: Path) -> None:
    """All ranks raise the one error, with rank, file and bytes; nothing is left over, and the next save succeeds."""

    def run(world: Collectives) -> str:
        model, optimizer = SETUP.build(world)
        fail = FailAt(moment)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=asynchronous, on_moment=fail)
        checkpointer.save(1)
        checkpointer.wait()
        SETUP.train(model, optimizer, range(1))
        fail.armed = world.rank == rank
        before = full_state(model, optimizer)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2)
            checkpointer.wait()
        assert caught.value.rank == rank
        assert_equal_state(full_state(model, optimizer), before)
        world.barrier()
        assert names(tmp_path) == ["latest", "lock", "step-00000001"]
        world.barrier()
        SETUP.train(model, optimizer, range(1, 2))
        checkpointer.save(2)
        checkpointer.close()
        return str(caught.value)

    said = run_threads(2, run)
    assert said[0] == said[1]
    assert said[0].startswith(f"rank {rank}: /somewhere/file: No space left on device: this rank needs ")
    assert " are free" in said[0]
    assert verify_checkpoint(tmp_path).step == 2
    assert verify_checkpoint(tmp_path).is_sound


AFTER_COMMIT = [Moment.RENAMED, Moment.COMMITTED, Moment.LATEST_WRITTEN, Moment.LATEST_REPLACED]
WHILE_RETIRING = [Moment.RETIRING, Moment.RETIRED]


@pytest.mark.pairs("moment", "asynchronous")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("moment", [*Moment], ids=lambda moment: moment.name)
def test_a_failure_at_each_moment(moment: Moment, asynchronous: bool, tmp_path: Path) -> None:
    """Whatever fails, at whatever moment: `latest` is whole, it is the old one or the new one, and the run goes on.

    The error says that the step is saved if and only if it is; that an old one cannot be deleted is a warning.
    """
    fail = FailAt(moment)
    run = SmallRun(tmp_path, keep=1, on_moment=fail, asynchronous=asynchronous)
    run.train(5)
    run.checkpointer.wait()
    fail.armed = True

    def save() -> None:
        run.train(10)
        run.checkpointer.wait()

    if moment in WHILE_RETIRING:
        with pytest.warns(UserWarning, match=r"step 10 .* is saved, but older ones could not be deleted"):
            save()
    else:
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save()
        assert ("step 10 is saved" in str(caught.value)) == (moment in AFTER_COMMIT)
        assert "nothing was changed" not in str(caught.value)
    assert verify_checkpoint(tmp_path).is_sound
    newest = 10 if moment in (*AFTER_COMMIT, *WHILE_RETIRING) else 5
    assert run.checkpointer.latest() == newest
    run.train(20)
    run.checkpointer.wait()
    assert verify_checkpoint(tmp_path).step == 20
    assert run.checkpointer.steps() == [20]
    run.checkpointer.close()


def test_what_cannot_be_deleted_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses to delete one old checkpoint, the save is a success, the others go, and the next tries."""
    run = SmallRun(tmp_path, keep=2)
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if ".deleted-" in str(target) and "step-00000005" in str(source):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        rename(source, target)

    run.train(10)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        for step in (15, 20):
            with pytest.warns(UserWarning, match="is saved, but older ones could not be deleted.*not permitted"):
                run.train(step)
    assert run.checkpointer.steps() == [5, 15, 20]
    run.train(25)
    assert run.checkpointer.steps() == [20, 25]
    run.checkpointer.close()


def test_training_goes_on_with_a_warning(tmp_path: Path) -> None:
    """`on_save_error="warn"`: `save` returns None on every rank, and the next one succeeds."""

    def run(world: Collectives) -> Any:
        model, optimizer = SETUP.build(world)
        fail = FailAt(Moment.PIECE_WRITTEN)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, on_save_error="warn", on_moment=fail)
        fail.armed = world.rank == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failed = checkpointer.save(1)
        saved = checkpointer.save(2)
        checkpointer.close()
        return failed, saved

    assert run_threads(2, run) == [(None, tmp_path / "step-00000002")] * 2
    fail = FailAt(Moment.PREPARED)
    fail.armed = True
    with pytest.warns(UserWarning, match="a save has failed, and the program goes on: rank 0: .*No space left"):
        assert Checkpointer(tmp_path, ranks=ALONE, on_save_error="warn", on_moment=fail).save(3) is None


def test_loading_goes_on_with_a_warning(tmp_path: Path) -> None:
    """The same if `load` is what learns that a save in the background has failed: what was saved before is loaded."""
    fail = FailAt(Moment.PIECE_WRITTEN)
    run = SmallRun(tmp_path, on_save_error="warn", asynchronous=True, on_moment=fail)
    run.train(5)
    run.checkpointer.wait()
    fail.armed = True
    run.train(10)
    with pytest.warns(UserWarning, match="a save has failed, and the program goes on: rank 0"):
        assert run.resume() == 5
    run.checkpointer.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_too_little_space_is_seen_before_anything_is_written(tiny_disk: Path) -> None:
    """A model of 1 MB on a disk of 300 kB: need and free are named, and nothing is written."""

    def run(world: Collectives) -> str:
        checkpointer = Checkpointer(tiny_disk / "run", torch.nn.Linear(500, 500), ranks=world)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1)
        return str(caught.value)

    for said in run_threads(2, run):
        assert "needs 1,0" in said
        assert "are free" in said
    assert names(tiny_disk / "run") == ["lock"]


def test_a_disk_that_fills_up_while_writing(tiny_disk: Path) -> None:
    """Somebody else takes the space between the look and the write: the real error of the real file system."""
    hog = tiny_disk / "hog"

    def take_it(moment: Moment) -> None:
        if moment is Moment.FILE_OPENED and armed:
            armed.pop()
            with hog.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"\0" * 4096)
                except OSError:
                    pass

    armed: list[bool] = []
    model = torch.nn.Linear(100, 100)
    checkpointer = Checkpointer(tiny_disk / "run", model, ranks=ALONE, on_moment=take_it)
    checkpointer.save(1)
    armed.append(True)
    with pytest.raises(CheckpointError, match=r"rank 0: .*No space left on device: this rank needs \d.* are free"):
        checkpointer.save(2)
    assert names(tiny_disk / "run") == ["latest", "lock", "step-00000001"]
    assert verify_checkpoint(tiny_disk / "run").is_sound
    hog.unlink()
    checkpointer.save(2)
    checkpointer.close()
    assert verify_checkpoint(tiny_disk / "run").step == 2


def test_a_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as a quota does it: a clear error, and what was there before stays."""

    def work() -> None:
        small = Checkpointer(tmp_path, torch.nn.Linear(2, 2), ranks=ALONE)
        small.save(1)
        small.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(CheckpointError, match="File too large: this rank needs"):
            Checkpointer(tmp_path, torch.nn.Linear(100, 100), ranks=ALONE).save(2)

    assert end_of(fork(work)) == 0
    assert names(tmp_path) == ["latest", "lock", "step-00000001"]
    assert verify_checkpoint(tmp_path).is_sound


def test_a_value_that_cannot_be_saved(tmp_path: Path) -> None:
    """One rank's `rank_extra` has a lambda: every rank gets the error with its path, and nothing is written."""

    def run(world: Collectives) -> str:
        checkpointer = Checkpointer(tmp_path, ranks=world)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1, rank_extra={"f": (lambda: 0) if world.rank == 1 else 0})
        assert caught.value.fqn == "rank_extra/1/f"
        return str(caught.value)

    assert len(set(run_threads(2, run))) == 1
    assert names(tmp_path) == ["lock"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """The second time it is refused on every rank, and the first stays."""

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        with Checkpointer(tmp_path, model, optimizer, ranks=world) as checkpointer:
            checkpointer.save(1)
            with pytest.raises(CheckpointError, match="a checkpoint of step 1 exists already"):
                checkpointer.save(1)

    run_threads(2, run)
    assert verify_checkpoint(tmp_path).is_sound


def test_inside_a_pass_or_summoned(tmp_path: Path) -> None:
    """Saving while full parameters are shown is refused on every rank, with what to do."""

    def run(world: Collectives) -> None:
        model, _ = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, ranks=world)
        with summon_full_params(model):
            with pytest.raises(CheckpointError, match=r"leave summon_full_params\(\) first"):
                checkpointer.save(1)
        checkpointer.save(1)
        checkpointer.close()

    run_threads(2, run)


def test_ranks_that_do_not_share_a_model(tmp_path: Path) -> None:
    """Two ranks that each hold the whole of their own model in one unit: parts that overlap are refused."""

    def run(world: Collectives) -> None:
        model, _ = SETUP.build(ALONE)
        Checkpointer(tmp_path, model, ranks=world).save(1)

    with pytest.raises(RankError) as caught:
        run_threads(2, run)
    assert "occur twice or not at all; ranks that do not share one model" in str(caught.value.__cause__)


# Two writers


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Another process that saves there is named, with its host; so is another writer of the same process."""
    run = SmallRun(tmp_path)
    run.train(5)

    def work() -> None:
        other = SmallRun(tmp_path)
        other.resume()  # reading is allowed
        with pytest.raises(CheckpointError) as caught:
            other.train(10)
        assert f"process {os.getppid()} on host {socket.gethostname()}" in str(caught.value)
        assert "give each job a directory of its own" in caught.value.hint

    assert end_of(fork(work)) == 0
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on host") as caught:
        SmallRun(tmp_path).train(5)
    assert "in this process" in caught.value.hint
    run.train(10)
    run.checkpointer.close()
    other = SmallRun(tmp_path)
    other.resume()
    other.train(15)
    other.checkpointer.close()


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    """A writer that exits without a word, while a child of it lives on, does not keep the directory locked."""
    read, write = os.pipe()

    def work() -> None:
        run = SmallRun(tmp_path)
        run.train(5)
        if os.fork() == 0:  # like a worker of a data loader
            os.close(write)
            os.read(read, 1)
        os._exit(0)

    assert end_of(fork(work)) == 0
    run = SmallRun(tmp_path)
    run.resume()
    run.train(10)
    run.checkpointer.close()
    os.close(write)
    os.close(read)
    assert open_checkpoint(tmp_path).manifest.step == 10


@each_row("step", [0, 10**8, 1_764_000_000_000_000_000, 2**63 - 1])
def test_steps_of_any_length_are_found(step: int, tmp_path: Path) -> None:
    """A step may be as large as the time in nanoseconds: what is saved is listed, loaded and replaced."""
    run = SmallRun(tmp_path)
    run.checkpointer.save(step)
    assert CheckpointDirectory(tmp_path).steps() == [step]
    loaded = run.checkpointer.load()
    assert loaded is not None
    assert loaded.step == step
    run.checkpointer.close()


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_place_that_one_rank_cannot_look_at(
    tmp_path: Path, on_save_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system tells one rank nothing of the directory, all ranks fail alike, and the next save succeeds."""
    failing: set[int] = set()
    statvfs = os.statvfs

    def stale(path: Any) -> Any:
        if threading.get_ident() in failing:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", stale)

    def run(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, on_save_error=on_save_error)
        checkpointer.save(1)
        if world.rank == 1:
            failing.add(threading.get_ident())
        if on_save_error == "raise":
            with pytest.raises(CheckpointError, match="Stale file handle") as caught:
                checkpointer.save(2)
            assert caught.value.rank == 1
        else:
            assert checkpointer.save(2) is None
        failing.clear()
        world.barrier()
        assert sorted(each for each in names(tmp_path) if each.startswith("step")) == ["step-00000001"]
        world.barrier()
        checkpointer.save(3)
        assert checkpointer.steps() == [1, 3]
        checkpointer.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_threads(2, run)


@each_row("asynchronous", [False, True])
def test_ranks_that_save_different_steps(asynchronous: bool, tmp_path: Path) -> None:
    """Every rank raises the one error, which names both steps, and nothing is written; the next save succeeds."""

    def run(world: Collectives) -> str:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=world, asynchronous=asynchronous)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(5 + (world.rank == 2))
        assert caught.value.rank == 2
        world.barrier()
        assert names(tmp_path) == []
        world.barrier()
        checkpointer.save(6)
        checkpointer.close()
        return str(caught.value)

    said = run_threads(3, run)
    assert len(set(said)) == 1
    assert "the ranks ask for different things: step is 5 on ranks 0-1, 6 on rank 2" in said[0]
    assert verify_checkpoint(tmp_path).step == 6


def test_ranks_that_name_different_directories(tmp_path: Path) -> None:
    """Every rank refuses to save and to load, naming both directories, and makes neither; a link to one is the same."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")

    def run(world: Collectives) -> list[str]:
        model, optimizer = SETUP.build(world)
        said = []
        own = Checkpointer(tmp_path / f"run-{world.rank}", model, optimizer, ranks=world)
        for deed in (lambda: own.save(1), own.load):
            with pytest.raises(CheckpointError) as caught:
                deed()
            said.append(str(caught.value))
        world.barrier()
        assert names(tmp_path) == ["link"]
        world.barrier()
        with Checkpointer(link if world.rank else tmp_path / "run", model, optimizer, ranks=world) as one:
            one.save(1)
            assert one.load() is not None
        return said

    first, second = run_threads(2, run)
    assert first == second
    for said in first:
        assert f"rank 1: expected the directory of rank 0, {tmp_path}/run-0, found {tmp_path}/run-1" in said
    assert verify_checkpoint(tmp_path / "run").step == 1


def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    """If rank 0 does not see what another wrote, the save fails on all, says what to do, and makes no checkpoint."""

    def run(world: Collectives) -> str:
        def hide(moment: Moment) -> None:
            if moment is Moment.REPORTED and world.rank == 1:
                next(tmp_path.glob("*/rank-00001.done")).unlink()

        model, optimizer = SETUP.build(world)
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(tmp_path, model, optimizer, ranks=world, on_moment=hide).save(1)
        return str(caught.value)

    first, second = run_threads(2, run)
    assert first == second
    assert "rank-00001.done: rank 1 wrote this file, rank 0 finds none; all ranks must see one" in first
    assert "step-00000001" not in names(tmp_path)


def test_a_warning_about_what_is_saved(tmp_path: Path) -> None:
    """With `on_save_error="warn"`, a failure after the checkpoint is complete says that the step is saved, and it is."""
    fail = FailAt(Moment.LATEST_WRITTEN)
    run = SmallRun(tmp_path, on_save_error="warn", on_moment=fail)
    run.train(5)
    fail.armed = True
    with pytest.warns(
        UserWarning, match=r"a save has failed, and the program goes on: .*: step 10 is saved, and load\(\)"
    ):
        run.train(10)
    assert run.checkpointer.latest() == 10
    run.train(15)
    assert run.checkpointer.steps() == [5, 10, 15]
    run.checkpointer.close()


class Normed(torch.nn.Module):
    """A model with statistics, and a buffer that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.out(self.norm(x))
        return out


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_last_save_says_if_the_failed_step_has_written_buffers(has_begun: bool, tmp_path: Path) -> None:
    """A forward pass counts its batch in the statistics of batch norms, though its step does not come."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(tmp_path, model, optimizer, ranks=ALONE)
    for each in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        model(torch.randn(4, 3)).sum().backward()
        each.step()
    model.eval()(torch.randn(4, 3))
    if has_begun:
        model.train()(torch.randn(4, 3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert checkpointer.save_last(2) is not None
    # The others are written by a kernel that counts no change.
    named = "the buffers 'norm.num_batches_tracked' as they are now"
    assert [named in str(each.message) for each in told] == [True] * has_begun


def test_parameters_that_were_written_by_hand_are_noticed() -> None:
    """If no optimizer steps, nobody counts; parameters that came later, or a loaded model, are no such change."""
    model, late = Normed(), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(Subject(model, {("optimizer",): optimizer}, 0))
    optimizer.add_param_group({"params": [late]})
    assert not watch.is_uncounted
    with torch.no_grad():
        model.out.weight.add_(1)
    assert watch.is_uncounted
    watch.begin()
    assert not watch.is_uncounted
    optimizer.step()
    with torch.no_grad():
        model.out.weight.add_(1)
    assert not watch.is_uncounted
    assert watch.steps == {("optimizer",): 1}


def test_the_hook_of_a_checkpointer_goes_with_it(tmp_path: Path) -> None:
    """A program that makes one for each save has one hook for all, which torch may go through as they come and go."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Checkpointer(tmp_path, model, optimizer, ranks=ALONE)
    gc.collect()
    before = len(optimizers._global_optimizer_post_hooks), len(_WATCHES)
    for _ in range(3):
        Checkpointer(tmp_path, model, optimizer, ranks=ALONE)
    assert len(optimizers._global_optimizer_post_hooks) == before[0]
    gc.collect()
    assert len(_WATCHES) == before[1]
    kept.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EFBIG, r"needs [1-9][\d,]* bytes; let this process write longer files \(ulimit -f\)"),
        (errno.ENOSPC, r"needs [1-9][\d,]* bytes, and [\d,]+ are free; free space"),
    ],
)
def test_the_advice_is_for_the_limit_that_was_met(number: int, said: str, asynchronous: bool, tmp_path: Path) -> None:
    """A file that may not grow is no full disk; the bytes that are told are those of the rank."""

    def refuse(moment: Moment) -> None:
        if moment is Moment.FILE_SYNCED:
            raise OSError(number, os.strerror(number), "/somewhere/file")

    checkpointer = Checkpointer(tmp_path, Normed(), ranks=ALONE, asynchronous=asynchronous, on_moment=refuse)
    with pytest.raises(CheckpointError, match=said):
        checkpointer.save(1)
        checkpointer.wait()


def test_a_disk_that_fails_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says of `fsync` has no name: the error has that of the file, or of the directory."""

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*rank-00000.*: Input/output error"):
        Checkpointer(tmp_path, Normed(), ranks=ALONE).save(1)
