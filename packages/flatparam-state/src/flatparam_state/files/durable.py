"""What makes files and names last: every write here is on the disk when it returns."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_durably", "sync_directory", "write_durably"]


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
