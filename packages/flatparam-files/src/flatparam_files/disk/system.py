"""The disk: regular files and no others, writes that are on it when they return, and the room that is left."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Final, final

from flatparam_core import Threshold
from flatparam_files.disk.checkpoint_error import CheckpointError

__all__ = [
    "OPEN_FILES",
    "ReopenedFile",
    "free_nbytes",
    "make_directory",
    "new_file",
    "open_regular",
    "replace_durably",
    "sync_directory",
    "sync_file",
    "write_durably",
]

OPEN_FILES: Final = Threshold(
    "state.open_files",
    64,
    "So many files of ranks stay open while a checkpoint is read, or written for other ranks; more are reopened.",
)


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    follows_links: bool = True,
) -> int:
    """Open a regular file, and return its descriptor.

    Whoever can write to a directory can put a FIFO there, which an ordinary `open` waits for, a device that never
    ends, or a link to a file of the user, which would be overwritten.

    Args:
        flags: those of `os.open`; a new file can be read by whoever can enter its directory, and written by its owner.
        follows_links: whether `path` may be a symbolic link to a regular file, or the same file may have a second name.

    Raises:
        CheckpointError: if it is anything else than a regular file, saying what it is.
        OSError: if it cannot be opened.
    """
    # Without waiting for the other end of a FIFO; a regular file is opened as ever.
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follows_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o644 & _mode_in(Path(path).parent) if flags & os.O_CREAT else 0)
    except OSError as error:
        # A FIFO that nobody reads cannot be opened to write, nor can a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) and os.path.lexists(path):
            raise _not_regular(path, os.lstat(path).st_mode) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(path, found.st_mode)
        if not follows_links and found.st_nlink > 1:
            raise CheckpointError(
                f"{path}: the same file has {found.st_nlink - 1} other name(s)",
                path=path,
                hint=f"see where it comes from, and delete {path}",
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _not_regular(path: str | os.PathLike[str], mode: int) -> CheckpointError:
    kind = next((words for is_it, words in _KINDS if is_it(mode)), "something else")
    return CheckpointError(
        f"{path}: expected a regular file, found {kind}",
        path=path,
        hint="see where it comes from, and put a file in its place or delete it",
    )


def make_directory(path: Path, *, is_private: bool | None = None) -> None:
    """Make a directory if it is not there, and those above.

    Args:
        is_private: let nobody but the owner enter it, also if it is there already; None is as the one above has it.
    """
    is_below = is_private is None and path.parent.exists() and _is_private(path.parent)
    path.mkdir(_PRIVATE if is_private or is_below else 0o777, parents=True, exist_ok=True)
    if is_private and not _is_private(path):
        path.chmod(_PRIVATE)


_PRIVATE: Final = 0o700


def _is_private(directory: Path) -> bool:
    return not directory.stat().st_mode & 0o077


def _mode_in(directory: Path) -> int:
    """The permissions that a new file in `directory` may have: none but the owner's, if only the owner can enter it."""
    return 0o600 if _is_private(directory) else 0o666


def new_file(path: Path, *, buffering: int = 0) -> IO[bytes]:
    """Make and open the file `path`, which has to be gone; in a private directory, only its owner can read it.

    Raises:
        FileExistsError: if something has this name, be it a link to nothing.
    """
    mode = _mode_in(path.parent)
    return open(path, "xb", buffering=buffering, opener=lambda name, flags: os.open(name, flags, mode))


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file `path`; what has this name is not touched, and has to be gone.

    Raises:
        FileExistsError: if something has this name, be it a link to nothing.
    """
    with new_file(path) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        sync_file(file)


@final
class ReopenedFile:
    """A new file that is open only while something is written to it, for a process that writes very many at once."""

    def __init__(self, path: Path) -> None:
        """Make the file, which must not exist."""
        with new_file(path):
            self.path = path

    def write(self, data: memoryview) -> int:
        """Append bytes; returns how many were written."""
        with self.path.open("ab", buffering=0) as file:
            return file.write(data)

    def close(self) -> None:
        """Do nothing: it is closed."""


def sync_file(file: IO[bytes] | ReopenedFile) -> None:
    """Wait until what was written to `file` is on the disk; what it has buffered has to be flushed before."""
    if isinstance(file, ReopenedFile):
        with file.path.open("ab", buffering=0) as opened:
            sync_file(opened)
    else:
        os.fsync(file.fileno())


def replace_durably(source: Path, target: Path) -> None:
    """Give `source` the name `target` (in the same directory), in place of a file that has it."""
    source.replace(target)
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_nbytes(path: Path) -> int:
    """The bytes that an ordinary user can still write to the file system of `path`, or of what will contain it."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
