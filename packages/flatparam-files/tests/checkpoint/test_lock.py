"""One writer at a time, on systems with locks of files and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.disk.checkpoint_error import CheckpointError

WITHOUT_FCNTL = """
import os, sys
import torch, torch.distributed, torch.distributed.checkpoint  # which ask for the platform, not for the names
sys.modules["fcntl"] = None
for name in ("pread", "pwrite", "register_at_fork", "O_CLOEXEC"):
    if hasattr(os, name):
        delattr(os, name)
from pathlib import Path
import flatparam_files.checkpoint.commit, flatparam_files.checkpoint.writer
from flatparam_files.checkpoint.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
lock.acquire()
lock.acquire()
print("held" if lock.is_held else "not held")
if sys.argv[2:] == ["release"]:
    lock.release()
"""


def without_fcntl(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_FCNTL, str(root), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "CheckpointError" in ended.stderr or ended.returncode == 0, ended.stderr
    return ended


def test_a_system_without_locks(tmp_path: Path) -> None:
    """Without `fcntl` the package can be imported; an owner who has not released is named, and can be cleared by hand."""
    assert without_fcntl(tmp_path, "release").stdout == "held\n"
    assert without_fcntl(tmp_path).stdout == "held\n"
    second = without_fcntl(tmp_path)
    assert second.returncode == 1
    assert "another writer has it" in second.stderr
    assert f"delete {tmp_path / 'lock'}" in second.stderr
    (tmp_path / "lock").unlink()
    assert without_fcntl(tmp_path).stdout == "held\n"


def test_the_owner_is_named(tmp_path: Path) -> None:
    """A second lock in the same directory is refused with the process that has the first; released, it can be had."""
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with pytest.raises(CheckpointError, match=f"another writer has it: process {os.getpid()} on host"):
        second.acquire()
    first.release()
    second.acquire()
    assert second.is_held
    second.forget()


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_lock_that_is_gone_is_taken_anew(tmp_path: Path, how: str) -> None:
    """If somebody deletes the file, or moves the directory, the next use locks what is there then, or is refused."""
    root = tmp_path / "run"
    root.mkdir()
    first, second = DirectoryLock(root), DirectoryLock(root)
    first.acquire()
    if how == "deleted":
        (root / "lock").unlink()
    else:
        root.rename(tmp_path / "moved")
        root.mkdir()
    first.acquire()
    with pytest.raises(CheckpointError, match="another writer has it"):
        second.acquire()
    (root / "lock").unlink()
    second.acquire()
    with pytest.raises(CheckpointError, match="another writer has it"):
        first.acquire()
