"""The text: found, read, hashed and cut in two, without torch."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attrs import field, frozen

from .errors import UserError

_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_HELD_OUT_SHARE: Final = 20
"""One part in so many, at the end of the text, is held out."""


@frozen
class Corpus:
    """All the text as bytes, and where it came from."""

    source: str
    files: int
    text: bytes = field(repr=False)
    sha256: str

    @property
    def boundary(self) -> int:
        """Training text is ``text[:boundary]``, held-out text is ``text[boundary:]``."""
        return len(self.text) - len(self.text) // _HELD_OUT_SHARE

    @property
    def held_out_nbytes(self) -> int:
        """How much text is only evaluated on."""
        return len(self.text) - self.boundary

    def check_context(self, context: int) -> None:
        """Raise `UserError` unless the held-out text has at least one row: ``context`` bytes and the one after."""
        if self.held_out_nbytes < context + 1:
            raise UserError(
                f"{self.source} holds {len(self.text):,} bytes, which is too little: with --context {context} it takes "
                f"{_HELD_OUT_SHARE * (context + 1):,} (one part in {_HELD_OUT_SHARE} is held out). "
                "Give more text or a smaller --context."
            )


def read_corpus(data: Path | None) -> Corpus:
    """Read the standard library's source, or the file or folder ``data``; always the same bytes in the same order."""
    if data is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        return _joined(f"the Python {version} standard library", list(_python_files(folder)))
    if not data.exists():
        raise UserError(f"--data {data} does not exist.")
    if data.is_file():
        return _joined(str(data), [data])
    if not data.is_dir():
        raise UserError(f"--data {data} is neither a file nor a folder.")
    return _joined(f"the folder {data}", list(_visible_files(data)))


def _joined(source: str, paths: list[Path]) -> Corpus:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    text = b"".join(texts)
    if not text:
        raise UserError(f"{source} holds no text" + (f" (in {len(paths)} files)." if paths else ": no files in it."))
    return Corpus(source, len(paths), text, hashlib.sha256(text).hexdigest())


def _python_files(folder: Path) -> Iterator[Path]:
    """Every ``*.py`` below ``folder``, but tests and what was installed beside the standard library."""
    return (path for path in _walk(folder, _SKIPPED_FOLDERS) if path.suffix == ".py")


def _visible_files(folder: Path) -> Iterator[Path]:
    """Every regular file below ``folder`` whose path there has no part that begins with a dot."""
    return (path for path in _walk(folder, frozenset()) if path.is_file())


def _walk(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))
