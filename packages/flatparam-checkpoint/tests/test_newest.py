"""Which checkpoint is the newest: the manifests say so; and what happens to one that is damaged, or deleted meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row

from flatparam_checkpoint.load import load_session
from flatparam_files import CheckpointError, open_checkpoint, verify_checkpoint
from flatparam_files.checkpoint import reader as reading
from flatparam_files.checkpoint.fields import read_sealed, seal

from .small import SmallRun


def saved(root: Path, steps: int, **options: Any) -> None:
    """Train to `steps`, resuming from what is there, saving every five."""
    run = SmallRun(root, **options)
    run.resume()
    run.train(steps)
    run.checkpointer.close()


def turn_the_clock_back(root: Path) -> None:
    """Have every checkpoint look younger than whatever is saved next, and the first youngest."""
    for age, path in enumerate(sorted(root.glob("step-*"))):
        for file in (path / "manifest.json", path):
            os.utime(file, (4e9 - age, 4e9 - age))


def damage(path: Path, how: str) -> None:
    """Flip a byte of a checkpoint's manifest or of its tensors, or delete its tensors."""
    if how == "no tensors":
        (path / "rank-00000.safetensors").unlink()
        return
    file = path / ("manifest.json" if how == "manifest" else "rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


@each_row("what", ["manifest", "latest", "no latest"])
def test_what_stands_for_a_damaged_checkpoint_is_a_problem(what: str, tmp_path: Path) -> None:
    """Whoever opens the directory of a run is warned, and it is not sound, if an older checkpoint is used instead."""
    saved(tmp_path, 10)
    if what == "manifest":
        damage(tmp_path / "step-00000010", "manifest")
    elif what == "latest":
        (tmp_path / "latest").write_bytes(b"#" + (tmp_path / "latest").read_bytes()[1:])
    else:
        (tmp_path / "latest").unlink()
    used = "step-00000005" if what == "manifest" else "step-00000010"
    with pytest.warns(UserWarning, match=f"{used}, is used instead"), open_checkpoint(tmp_path) as reader:
        assert reader.path.name == used
    found = verify_checkpoint(tmp_path)
    assert not found.is_sound
    assert f"{used}, is used instead" in found.problems[0]
    assert verify_checkpoint(tmp_path / used).is_sound


def test_retention_beside_a_clock_that_went_back(tmp_path: Path) -> None:
    """The newest are kept, in one process and over a restart, whatever the times of their files are."""
    root = tmp_path / "run"
    saved(root, 15)
    turn_the_clock_back(root)
    saved(root, 20, keep=2)
    assert SmallRun(root).checkpointer.steps() == [15, 20]
    turn_the_clock_back(root)
    saved(root, 30, keep=2)
    assert SmallRun(root).checkpointer.steps() == [25, 30]


def test_the_newest_beside_a_clock_that_went_back(tmp_path: Path) -> None:
    """If `latest` is lost, the last save is loaded, though an earlier one has later times and a larger step."""
    root = tmp_path / "run"
    saved(root, 15)
    run = SmallRun(root)
    run.checkpointer.load(5)
    run.step = 5
    run.train(7, every=7)
    run.checkpointer.close()
    turn_the_clock_back(root)
    (root / "latest").unlink()
    with pytest.warns(UserWarning, match="latest is missing: the newest sound checkpoint, step-00000007"):
        assert SmallRun(root).resume() == 7


def test_a_successor_beside_a_clock_that_went_back(tmp_path: Path) -> None:
    """A checkpoint whose writer died before `latest` named it is the latest, though its files look older."""
    root = tmp_path / "run"
    saved(root, 5)
    before = (root / "latest").read_bytes()
    saved(root, 10)
    (root / "latest").write_bytes(before)
    turn_the_clock_back(root)
    assert SmallRun(root).resume() == 10


def test_manifests_without_a_number(tmp_path: Path) -> None:
    """Saves of the first versions, which have no number, are in the order of their times, and before all others."""
    root = tmp_path / "run"
    saved(root, 15)
    for path in root.glob("step-*/manifest.json"):
        content = read_sealed(path)
        del content["number"]
        path.write_bytes(seal(content))
    for age, step in enumerate((10, 5, 15)):
        os.utime(root / f"step-{step:08d}" / "manifest.json", (1e9 + age, 1e9 + age))
    saved(root, 20, keep=3)
    assert SmallRun(root).checkpointer.steps() == [5, 15, 20]


@each_row("how", ["manifest", "tensors", "no tensors"])
def test_a_damaged_checkpoint_in_the_way(how: str, tmp_path: Path) -> None:
    """A job that began anew before it saves that step again; what was there is kept under a name that says so."""
    root = tmp_path / "run"
    saved(root, 10)
    damage(root / "step-00000010", how)
    run = SmallRun(root)
    run.checkpointer.load(5)
    run.step = 5
    with pytest.warns(UserWarning, match=r"step 10 in .* is damaged, and is saved again.*step-00000010\.damaged-"):
        run.train(10)
    run.checkpointer.close()
    (aside,) = root.glob("step-00000010.damaged-*")
    assert (aside / "manifest.json").exists()
    assert verify_checkpoint(root).is_sound
    before = open_checkpoint(root / "step-00000005").manifest
    assert open_checkpoint(root).manifest.number > before.number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(root, 15)
    assert SmallRun(root).resume() == 15


def test_a_sound_checkpoint_in_the_way(tmp_path: Path) -> None:
    """A sound checkpoint of the step is not replaced."""
    root = tmp_path / "run"
    saved(root, 10)
    run = SmallRun(root)
    run.checkpointer.load(5)
    run.step = 5
    with pytest.raises(CheckpointError, match="a checkpoint of step 10 exists already"):
        run.train(10)
    assert SmallRun(root).resume() == 10


def deleted_before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, path: Path) -> None:
    """Have the checkpoint at `path` deleted just before the next call of a function of `module`."""
    function = getattr(module, name)

    def first_delete(*arguments: Any, **named: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        return function(*arguments, **named)

    monkeypatch.setattr(module, name, first_delete)


def test_loading_beside_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the latest is deleted while it is loaded, the one that is the latest then is loaded."""
    root = tmp_path / "run"
    saved(root, 15)
    shutil.copytree(root, tmp_path / "copy")
    before = read_sealed(root / "step-00000010" / "manifest.json")["save_id"]
    (root / "latest").write_bytes(seal({"name": "step-00000010", "save_id": before}))
    shutil.rmtree(root / "step-00000015")
    function = load_session._check_presence

    def meanwhile(*arguments: Any) -> None:
        # A writer has gone on to step 15, and keeps one checkpoint.
        if (root / "step-00000010").exists():
            shutil.copytree(tmp_path / "copy" / "step-00000015", root / "step-00000015")
            shutil.copy(tmp_path / "copy" / "latest", root / "latest")
            shutil.rmtree(root / "step-00000010")
        function(*arguments)

    monkeypatch.setattr(load_session, "_check_presence", meanwhile)
    assert SmallRun(root).resume() == 15


def test_loading_a_step_beside_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the step that was asked for is deleted meanwhile, the error says so, and nothing is changed."""
    root = tmp_path / "run"
    saved(root, 10)
    run = SmallRun(root)
    deleted_before(monkeypatch, load_session, "_check_presence", root / "step-00000005")
    with pytest.raises(CheckpointError, match="step-00000005: deleted while it was read, by retention"):
        run.checkpointer.load(5)
    assert all((parameter == 1).all() for parameter in run.model.parameters())


def test_reading_beside_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose checkpoint is deleted says so; verifying the latest goes on with the one that is the latest then."""
    root = tmp_path / "run"
    saved(root, 10)
    with open_checkpoint(root / "step-00000005") as reader:
        shutil.rmtree(root / "step-00000005")
        with pytest.raises(CheckpointError, match="deleted while it was read, by retention"):
            reader.load(next(iter(reader.tensors)))
    saved(root, 15)
    deleted_before(monkeypatch, reading, "_check_file", root / "step-00000015")
    found = verify_checkpoint(root)
    assert found.step == 10
    # Nobody has said so in `latest`, as retention does.
    (problem,) = found.problems
    assert "step-00000010, is used instead" in problem


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(
    call: str, name: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission, or a mount that is away: the save of that step says what the system said, and nothing is renamed."""
    root = tmp_path / "run"
    saved(root, 10)
    shutil.copy(root / "step-00000005" / "manifest.json", tmp_path / "kept")
    run = SmallRun(root)
    run.checkpointer.load(10)
    run.step = 0
    away = root / "step-00000005" / name
    function = getattr(os, call)

    def fail(first: Any, *arguments: Any) -> Any:
        path = first if call == "open" else os.readlink(f"/proc/self/fd/{first}")
        if str(path) == str(away):
            raise OSError(error, os.strerror(error), str(path))
        return function(first, *arguments)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be .*: {os.strerror(error)}; its contents may be"):
        run.train(5)
    monkeypatch.undo()
    assert not list(root.glob("*.damaged-*"))
    assert verify_checkpoint(root / "step-00000005").is_sound
    assert SmallRun(root).resume() == 10


def test_a_latest_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system cannot read the latest checkpoint, no older one is loaded in its place, and none is saved."""
    root = tmp_path / "run"
    saved(root, 10)
    function = os.open

    def fail(path: Any, *arguments: Any) -> int:
        if str(path) == str(root / "step-00000010" / "manifest.json"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path, *arguments)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError, match="cannot be opened: Permission denied"):
        SmallRun(root).resume()
    with pytest.raises(CheckpointError, match="cannot be opened: Permission denied"):
        SmallRun(root).train(15)
    monkeypatch.undo()
    assert SmallRun(root).checkpointer.steps() == [5, 10]


def test_a_file_on_a_mount_that_is_away(tmp_path: Path) -> None:
    """A file that is a link to nothing is not said to be damaged, as its target may come back."""
    root = tmp_path / "run"
    saved(root, 5)
    file = root / "step-00000005" / "rank-00000.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "mount" / "file")
    with pytest.raises(CheckpointError, match="its contents may be sound"):
        SmallRun(root).train(5)
    assert not list(root.glob("*.damaged-*"))


def test_a_directory_that_was_moved_away_is_locked_anew(tmp_path: Path) -> None:
    """The next save makes and locks it again, and counts from nothing; another writer is refused as before."""
    first = SmallRun(tmp_path / "run", keep=2)
    first.train(10)
    (tmp_path / "run").rename(tmp_path / "before")
    first.train(15)
    other = SmallRun(tmp_path / "run")
    with pytest.raises(CheckpointError, match="another writer has it"):
        other.train(5)
    first.train(20)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000015", "step-00000020"]
    assert sorted(path.name for path in (tmp_path / "before").glob("step-*")) == ["step-00000005", "step-00000010"]
    first.checkpointer.close()
    assert other.resume() == 20
