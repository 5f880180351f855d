"""The disk: regular files and no others, ranges that are read, writes that last, the room that is left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import IO, Final, TypeAlias, final

import torch
from torch import Tensor

from flatparam_core import Threshold
from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError

OPEN_FILES: Final = Threshold(
    "state.open_files",
    64,
    "So many files of ranks stay open while a checkpoint is read, or written for other ranks; more are reopened.",
)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follows_links: bool = True) -> int:
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
        _sync(file.fileno(), file.name)


def _sync(descriptor: int, path: str | Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Wait until the names in `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(descriptor, path)
    finally:
        os.close(descriptor)


def free_nbytes(path: Path) -> int:
    """The bytes that an ordinary user can still write to the file system of `path`, or of what will contain it."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# Reading ranges of a file, with errors that name it; without mapping it into memory


AnyPath: TypeAlias = str | os.PathLike[str]
"""The name of a file or directory, as a caller gives it."""

_POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a file that Git LFS leaves in the place of one that it has not fetched; see its specification."""
_POINTER_NBYTES: Final = 1024
"""Such a file is shorter than this."""


def unreadable(path: AnyPath, done: str, error: OSError) -> UnreadableError:
    """Return the error about a file that could not be `done` (opened, read), with what the system said."""
    return UnreadableError(
        f"{path}: cannot be {done}: {error.strerror or error}",
        path=path,
        hint="its contents may be sound: see whether its disk is mounted, and who may read it",
    )


def _is_pointer(descriptor: int, nbytes: int) -> bool:
    """Whether an open file is a pointer of Git LFS; one that cannot be read is told by the first read of its data."""
    if not len(_POINTER) <= nbytes <= _POINTER_NBYTES:
        return False
    with contextlib.suppress(OSError):
        return os.pread(descriptor, len(_POINTER), 0) == _POINTER
    return False


@final
class ByteFile(contextlib.AbstractContextManager["ByteFile"]):
    """A file that is open for reading. It counts the bytes that were read."""

    __slots__ = ("_descriptor", "nbytes", "nbytes_read", "path")

    def __init__(self, path: AnyPath, *, follows_links: bool = True) -> None:
        """Open `path`.

        Args:
            follows_links: whether it may be a symbolic link to a regular file.

        Raises:
            CheckpointError: if there is none, it is no regular file, or Git LFS has not fetched it.
            UnreadableError: if it cannot be opened for a different reason, saying why.
        """
        self._descriptor = -1
        self.path = Path(path)
        try:
            self._descriptor = open_regular(path, follows_links=follows_links)
        except ValueError as error:
            raise CheckpointError(f"{str(path)!r} cannot be the name of a file: {error}") from error
        except OSError as error:
            # A link that leads nowhere may lead to a disk that is not mounted.
            is_absent = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
            if is_absent and not os.path.islink(path):
                raise CheckpointError(
                    f"{path}: cannot be opened: {error.strerror}", path=path, hint="restore the file"
                ) from error
            raise unreadable(path, "opened", error) from error
        self.nbytes = os.fstat(self._descriptor).st_size
        self.nbytes_read = 0
        if _is_pointer(self._descriptor, self.nbytes):
            self.close()
            raise CheckpointError(
                f"{path}: expected the file itself, found a pointer of Git LFS to it",
                path=path,
                hint="run `git lfs pull` in the repository that it comes from",
            )

    def __del__(self) -> None:
        # An interrupt may come before the first line of the constructor.
        if hasattr(self, "_descriptor"):
            self.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; calling it twice is harmless."""
        # In this order: after an interrupt in between, the number may be that of another file.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return the bytes `[offset, offset + nbytes)`.

        Raises:
            CheckpointError: if the file ends before.
            UnreadableError: if it cannot be read.
        """
        data = bytearray(max(nbytes, 0) if nbytes <= self.nbytes else 0)
        self.read_into(offset, nbytes, memoryview(data))
        return data

    def read_into(self, offset: int, nbytes: int, view: memoryview) -> None:
        """Put the bytes `[offset, offset + nbytes)` into `view`, which has as many bytes.

        Raises:
            CheckpointError: if the file ends before.
            UnreadableError: if it cannot be read.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.path}: expected {nbytes:,} bytes at offset {offset:,}, found a file of {self.nbytes:,} bytes",
                path=self.path,
                hint="it was truncated or replaced: use a different checkpoint",
            )
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.path, f"read at offset {offset + done:,}", error) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ended at {offset + done:,} while it was being read", path=self.path
                )
            done += count
        self.nbytes_read += nbytes


# The memory of tensors as bytes, and bytes as tensors


def bytes_view(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in row-major order as 1-D bytes; a view if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element of a larger tensor counts as contiguous, whatever its stride.
    if flat.stride() != (1,):
        flat = flat.as_strided((flat.numel(),), (1,)) if flat.numel() == 1 else flat.contiguous()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor of uint8 on the CPU, which it keeps; no copy, and no numpy.

    Raises TypeError for any other tensor: its address is no memory of this length.
    """
    if not (flat.is_cpu and flat.is_contiguous() and flat.dtype is torch.uint8):
        raise TypeError(f"expected contiguous uint8 on the CPU, found {flat.dtype}, {flat.stride()}, {flat.device}")
    memory = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    memory.tensor = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def tensor_of(data: bytearray, dtype: torch.dtype) -> Tensor:
    """Return the 1-D tensor whose memory `data` is."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order, in memory of their own."""
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(bytes_view(tensor))
    return memoryview(data)
