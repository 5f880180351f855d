"""Reading byte ranges of a file, with errors that name it; without mapping it into memory. Tensors as bytes."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError
from flatparam_files.disk.system import open_regular

__all__ = ["AnyPath", "ByteFile", "unreadable", "buffer_of", "bytes_view", "tensor_of"]

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
class ByteFile:
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

    def __enter__(self) -> Self:
        return self

    def __del__(self) -> None:
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it; calling it twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

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


def tensor_of(data: bytearray, dtype: torch.dtype) -> Tensor:
    """Return the 1-D tensor whose memory `data` is."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order, in memory of their own."""
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(bytes_view(tensor))
    return memoryview(data)
