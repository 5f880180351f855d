"""The lines that the commands write for people."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["say"]


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
