"""Everything the job says in words, and the table at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from attrs import frozen

_LABEL_WIDTH: Final = 11


@frozen
class Console:
    """Lines to standard output; only one rank's console is loud, so that each thing is said once."""

    is_loud: bool

    def say(self, text: str = "") -> None:
        """Write a line."""
        if self.is_loud:
            print(text, flush=True)

    def fact(self, label: str, text: str) -> None:
        """Write ``text`` after a label in the left column."""
        self.say(f"  {label:<{_LABEL_WIDTH}}{text}")

    def detail(self, text: str) -> None:
        """Write more about the last fact, below it."""
        self.fact("", text)

    def warn(self, text: str) -> None:
        """Write a line to standard error."""
        if self.is_loud:
            print(f"\ntrain.py: {text}", file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Write the one sentence that an error of the user's comes down to."""
    print(f"train.py: error: {text}", file=sys.stderr, flush=True)


def in_units(nbytes: float) -> str:
    """A number of bytes in the unit that suits it: ``16.6 MB``. Units are powers of ten."""
    for unit in ("B", "kB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def counted(number: int, noun: str) -> str:
    """``1 file``, ``734 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, numbers to the right, the last column as it comes."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = "  ".join("-" * width for width in widths)

    def line(row: Sequence[str]) -> str:
        first, *numbers, last = (*row,)
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)),
        ]
        return "  ".join([*cells, last]).rstrip()

    return [line(header), rule, *(line(row) for row in rows)]
