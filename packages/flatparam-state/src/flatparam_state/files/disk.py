"""The disk: writes that are on it when they return, and the room that is left."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_nbytes", "replace_durably", "sync_directory", "write_durably"]


def write_durably(path: Path, data: bytes) -> None:
    """Write the file `path`."""
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
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
