"""The error of everything that has to do with checkpoint files, and other failures as this error."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from flatparam_core import FlatParamError


class CheckpointError(FlatParamError):
    """Catch this when a checkpoint cannot be written, or cannot be trusted, or does not fit; nothing was changed then.

    `rank` is the rank that it is about, `path` the file or directory, `fqn` the parameter or path in the tree, `hint`
    what to do; each is None, or empty, if there is none. All that is known is in the message too.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        path: str | os.PathLike[str] | None = None,
        fqn: str | None = None,
        hint: str = "",
    ) -> None:
        """`message` says what was expected and found; `hint` follows it."""
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.rank = rank
        self.path = None if path is None else os.fspath(path)
        self.fqn = fqn
        self.hint = hint

    @staticmethod
    def told(error: BaseException) -> str:
        """The words for `error` in the `CheckpointError` of other ranks, with its class if that is a different one."""
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(CheckpointError, rank=self.rank, path=self.path, fqn=self.fqn, hint=self.hint)
        return again, (self.message,)


class UnreadableError(CheckpointError):
    """The system could not read a file, for want of a permission or of its disk: the file may be sound."""


# Failures while a damaged or foreign file is taken apart, as errors that name the file


_FAILURES: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)


@contextmanager
def damage_named(sentence: str, *, path: Path | None = None, hint: str = "") -> Iterator[None]:
    """Raise a CheckpointError of `sentence` for what the block raises, but for a CheckpointError of its own."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAILURES as error:
        raise CheckpointError(f"{sentence}: {type(error).__name__}: {error}", path=path, hint=hint) from error
