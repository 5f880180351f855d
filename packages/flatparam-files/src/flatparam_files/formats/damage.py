"""Failures while a damaged or foreign file is taken apart, as errors that name the file."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flatparam_files.disk import CheckpointError

__all__ = ["damage_named"]

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
