"""The lines that the commands write for people."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["say", "shown_nbytes"]


def shown_nbytes(nbytes: int) -> str:
    """A size for people: `1.2 GB`."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, to stdout by default; what is no text in it (names are from files) is escaped."""
    stream = stream or sys.stdout
    # It was closed when the process began, as by `>&-`.
    if stream is None:
        return
    if not line.isprintable():
        line = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
        )
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
