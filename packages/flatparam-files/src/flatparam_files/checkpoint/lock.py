"""One writer at a time in a directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any, Final, final

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import parse_json
from flatparam_files.disk.system import open_regular

try:
    import fcntl
except ImportError:
    # On a system that is not POSIX, the owner that is written into the file decides.
    fcntl = None  # type: ignore[assignment]

_NAME: Final = "lock"


@final
class DirectoryLock:
    """The file `<root>/lock`. The operating system takes the lock back when the process dies, however it dies.

    If the file system has no locks, the owner's process id decides, on its own host; if the operating system has none,
    the owner is taken to be alive until its file is deleted.
    """

    __slots__ = ("__weakref__", "_descriptor", "_root")

    def __init__(self, root: Path) -> None:
        """The directory is not locked yet."""
        self._root = root
        self._descriptor = -1
        _LOCKS.add(self)

    def __del__(self) -> None:
        # An interrupt may come before the first line of the constructor.
        if hasattr(self, "_descriptor"):
            self.forget()

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._descriptor >= 0

    @staticmethod
    def is_taken(root: Path) -> bool:
        """Whether a process that is alive writes to `root`, as far as can be told without being in its way for long."""
        try:
            descriptor = open_regular(root / _NAME, follows_links=False)
        except (CheckpointError, OSError):
            return False
        # Whoever releases it empties the file.
        is_owned = os.fstat(descriptor).st_size > 0
        try:
            if fcntl is None:
                return is_owned
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            # The file system has no locks.
            return is_owned
        finally:
            os.close(descriptor)

    def acquire(self) -> bool:
        """Lock the directory; return false, and do nothing, if the object holds the lock already.

        If the file was deleted, or the directory was replaced, since then, the lock is taken anew.

        Raises:
            CheckpointError: if somebody else writes there, naming host and process; if the lock is no regular file.
        """
        path = self._root / _NAME
        if self.is_held:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(self._descriptor)):
                    return False
            self.forget()
        # Its content is replaced, so it must not be a different file of the user's.
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, follows_links=False)
        try:
            self._take(descriptor, path)
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(owner).encode() + b"\n")
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def _take(self, descriptor: int, path: Path) -> None:
        owner = _owner(descriptor)
        try:
            if fcntl is None:
                raise OSError("this system has no locks of whole files")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(self._root, owner) from None
        except OSError:
            # The file system has no locks.
            if owner and (owner.get("host") != socket.gethostname() or _is_alive(owner.get("pid"))):
                raise _refusal(self._root, owner, f"; if that process is dead, delete {path}") from None

    def release(self) -> None:
        """Let others write to the directory."""
        if self.is_held:
            os.ftruncate(self._descriptor, 0)
        self.forget()

    def forget(self) -> None:
        """Close the file; in a forked child the parent goes on holding it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        found = parse_json(os.read(descriptor, 4096))
    except ValueError:
        # Nobody has written, or somebody is just writing.
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(pid: object) -> bool:
    if type(pid) is not int or pid <= 0:
        return False
    # On other systems signal 0 may end the process that it is sent to.
    if fcntl is None:
        return pid != os.getpid()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _refusal(root: Path, owner: dict[str, Any], more: str = "") -> CheckpointError:
    is_own = (owner.get("host"), owner.get("pid")) == (socket.gethostname(), os.getpid())
    advice = "stop that one, or give each job a directory of its own"
    if is_own:
        advice = "it is in this process: use the Checkpointer that is open, or close() it first"
    who = f"process {owner.get('pid', '?')} on host {owner.get('host', '?')} since {owner.get('since', '?')}"
    return CheckpointError(f"{root}: another writer has it: {who}", path=root, hint=f"{advice}{more}")


_LOCKS: Final[weakref.WeakSet[DirectoryLock]] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_LOCKS):
        lock.forget()


# A child that outlives its killed parent (a worker of a data loader, say) must not keep the directory locked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
