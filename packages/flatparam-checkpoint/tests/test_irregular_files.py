"""What is no regular file in a run's directory: nothing is overwritten through it, nothing waits for it or reads without end."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_files import CheckpointError, UnreadableError, open_checkpoint, verify_checkpoint
from flatparam_files.disk.system import open_regular
from flatparam_runtime import SingleCollectives

from .small import SmallRun

MANIFEST = "step-00000005/manifest.json"
RANK_FILE = "step-00000005/rank-00000.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's directory with the checkpoint of step 5."""
    run = SmallRun(tmp_path / "run")
    run.train(5)
    run.checkpointer.close()
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user's that has nothing to do with the run."""
    path = tmp_path / "thesis.txt"
    path.write_text("three years of work")
    return path


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def endless(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def second_name(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def directory(path: Path, victim: Path) -> None:
    path.mkdir()


def at_a_socket(path: Path, victim: Path) -> None:
    # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            listening.bind(path.name)
        finally:
            os.chdir(before)


Make = Callable[[Path, Path], None]
MADE = {
    "a FIFO": fifo,
    "a device": endless,
    "a symbolic link": link,
    "a second name": second_name,
    "a directory": directory,
    "a socket": at_a_socket,
}


@pytest.mark.parametrize("kind", MADE)
def test_in_place_of_the_lock(kind: str, root: Path, victim: Path) -> None:
    """A save is refused before anything is written, the error says what is there, and the victim is as it was."""
    (root / "lock").unlink()
    MADE[kind](root / "lock", victim)
    words = {"a device": "a symbolic link", "a second name": "other name"}.get(kind, kind)
    with pytest.raises(CheckpointError, match=words):
        SmallRun(root).save()
    assert victim.read_text() == "three years of work"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "lock", "step-00000005"]


@pytest.mark.parametrize(
    ("kind", "dangling"),
    [
        ("a symbolic link", False),
        ("a symbolic link", True),
        ("a second name", False),
        ("a FIFO", False),
        ("a device", False),
    ],
)
def test_in_place_of_the_new_latest(kind: str, dangling: bool, root: Path, victim: Path) -> None:
    """What has the name of the file that `latest` is made of is removed, and what it leads to is as it was."""
    target = victim.with_name("nothing") if dangling else victim
    run = SmallRun(root)
    run.resume()
    run.train(9)
    # As if it were put there between the beginning of a save and its end.
    MADE[kind](root / "latest.new", target)
    run.train(10)
    run.checkpointer.close()
    assert victim.read_text() == "three years of work"
    assert not victim.with_name("nothing").exists()
    assert open_checkpoint(root).manifest.step == 10


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "a second name"])
def test_in_place_of_latest(kind: str, root: Path, victim: Path) -> None:
    """The newest sound checkpoint is loaded, a warning says why, and the next save makes a file of it."""
    (root / "latest").unlink()
    MADE[kind](root / "latest", victim)
    run = SmallRun(root)
    with pytest.warns(UserWarning, match="latest: expected a regular file, found .*newest sound checkpoint"):
        assert run.resume() == 5
    if kind == "a directory":
        return
    run.train(10)
    run.checkpointer.close()
    assert (root / "latest").is_file()
    assert not (root / "latest").is_symlink()
    assert victim.read_text() == "three years of work"
    assert SmallRun(root).resume() == 10


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory", "a socket"])
@pytest.mark.parametrize("name", [MANIFEST, RANK_FILE])
def test_in_a_checkpoint(name: str, kind: str, root: Path, victim: Path) -> None:
    """Loading, verifying and reading end with an error that says what is there."""
    (root / name).unlink()
    MADE[kind](root / name, victim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="expected the .* bytes" if name == RANK_FILE else "checkpoint"):
            SmallRun(root).resume()
    if name == RANK_FILE:
        assert not verify_checkpoint(root).is_sound
        with pytest.raises(CheckpointError, match=kind), open_checkpoint(root) as reader:
            reader.load(next(iter(reader.tensors)))
    else:
        with pytest.raises(CheckpointError):
            verify_checkpoint(root)


@pytest.mark.parametrize(
    ("place", "found"), [("file", "a file"), ("file/run", "a file"), ("link", "a link to nothing")]
)
def test_in_place_of_the_directory(place: str, found: str, victim: Path, tmp_path: Path) -> None:
    """Saving, loading and listing say what is there instead of a directory, and leave it as it is."""
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    victim.rename(tmp_path / "file")
    checkpointer = Checkpointer(tmp_path / place, nn.Linear(2, 2), ranks=SingleCollectives())
    for deed in (lambda: checkpointer.save(1), checkpointer.load, checkpointer.steps, checkpointer.latest):
        with pytest.raises(CheckpointError, match=f"expected a directory, or nothing, found {found} here or above"):
            deed()
    assert (tmp_path / "file").read_text() == "three years of work"
    assert not (tmp_path / "nothing").exists()


def test_beside_a_directory_of_somebody_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories with other names are not looked into: the system may refuse it. If it lists nothing, it is told why."""
    (root / "lost+found").mkdir()
    is_file = Path.is_file

    def refusing(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refusing)
    checkpointer = Checkpointer(root, nn.Linear(2, 2), ranks=SingleCollectives())
    assert (checkpointer.steps(), checkpointer.latest()) == ([5], 5)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UnreadableError, match="run: cannot be listed: Permission denied"):
        checkpointer.steps()


def test_links_to_the_files_of_a_checkpoint(root: Path, tmp_path: Path) -> None:
    """A checkpoint can be read through links to regular files, as caches of downloads have them."""
    store = tmp_path / "store"
    store.mkdir()
    for name in (MANIFEST, RANK_FILE):
        shutil.move(root / name, store / Path(name).name)
        (root / name).symlink_to(store / Path(name).name)
    assert verify_checkpoint(root).is_sound
    assert SmallRun(root).resume() == 5


def test_opening_a_regular_file(victim: Path, tmp_path: Path) -> None:
    """It is opened through a link unless that is refused; what is not there is the system's error."""
    by_link = tmp_path / "link"
    by_link.symlink_to(victim)
    for path, follows in ((victim, True), (victim, False), (by_link, True)):
        descriptor = open_regular(path, follows_links=follows)
        assert os.read(descriptor, 100) == b"three years of work"
        os.close(descriptor)
    with pytest.raises(CheckpointError, match="a symbolic link"):
        open_regular(by_link, follows_links=False)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
