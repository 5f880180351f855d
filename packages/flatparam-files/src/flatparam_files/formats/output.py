"""Writing files and directories that appear only when they are complete, with holes in the place of zeros."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import torch

from flatparam_core import warn_caller
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.system import sync_file

_HOLE: Final = 1 << 16


def refuse_existing(path: Path) -> None:
    """Raise a CheckpointError if there is something at `path`."""
    if os.path.lexists(path):
        raise CheckpointError(
            f"the path {path} exists already", path=path, hint="choose a different name, or remove it first"
        )


def check_new(path: Path) -> None:
    """Raise a CheckpointError if there is something at `path`, or no directory that it could be made in."""
    refuse_existing(path)
    if not path.absolute().parent.is_dir():
        raise CheckpointError(
            f"expected a directory, found none: {path.absolute().parent}", path=path, hint="make it first"
        )


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, for a file or a directory; it is renamed to `path` when the block ends.

    If the block fails or is interrupted, what was written is removed.

    Raises:
        CheckpointError: if something cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.incomplete")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.incomplete"):
        warn_caller(f"{left} is of a command that was killed: remove it, unless one is writing {path} now")
    try:
        yield temporary
        temporary.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}", path=path) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


@final
class SparseFile:
    """A new file for writing; long runs of zero bytes become holes. The owner closes it."""

    def __init__(self, path: Path) -> None:
        """Create `path`."""
        self._file = path.open("xb", buffering=1 << 16)
        self._end = 0

    def __enter__(self) -> SparseFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._file.truncate(self._end)
                self._file.flush()
                sync_file(self._file)
        finally:
            self._file.close()

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._file.tell()

    def seek(self, position: int) -> None:
        """Go back, to write over what was there, or to the end."""
        self._file.seek(position)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`; returns how many bytes these are."""
        at, nbytes = self._file.tell(), len(data)
        if at >= self._end and _is_a_hole(data):
            self._file.seek(nbytes, os.SEEK_CUR)
        else:
            self._file.write(data)
        self._end = max(self._end, at + nbytes)
        return nbytes


@final
class Appended:
    """The rest of a file behind its position, as the file that `zipfile` writes."""

    def __init__(self, file: SparseFile) -> None:
        """Begin at the position of `file`."""
        self._file: SparseFile | None = file
        self._start = file.tell()
        self._at = 0

    def give_up(self) -> None:
        """Write nothing more, whatever is called; the finalizers of `zipfile` still end what was begun."""
        self._file = None

    def tell(self) -> int:
        """Return the position, from where it began."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, counted from where it began."""
        self._at = offset
        if self._file is not None:
            self._file.seek(self._start + offset)
        return offset

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`; returns how many bytes these are."""
        self._at += len(data)
        if self._file is not None:
            self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing, and so `close`: the owner of the file does it."""

    close = flush


def _is_a_hole(data: bytes | bytearray | memoryview) -> bool:
    """Return whether they are many bytes, all zero. Only writable buffers are looked at: those of tensors."""
    return not (len(data) < _HOLE or memoryview(data).readonly or torch.frombuffer(data, dtype=torch.uint8).any())
