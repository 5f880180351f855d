"""Everything the job says in words, and the table at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from .costs import Costs

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


@frozen
class Measured:
    """What the meter found, the largest over the ranks."""

    at_rest: int
    peak: int
    process_peak: int
    moved_per_step: int
    step_milliseconds: float


def summary(costs: Costs, measured: Measured) -> list[str]:
    """The table's lines. ``bytes`` columns carry exact numbers, so that they can be checked."""
    per = "1 rank" if costs.ranks == 1 else f"{costs.ranks} ranks"
    peak, above = "-", "not recorded: the run was stopped before its third step"
    if measured.peak:
        peak = f"{measured.peak:,}"
        above = f"{in_units(measured.peak - measured.at_rest)} above rest are activations and gathered units"
    rows = [
        ("parameters", f"{costs.shape.numel:,}", "", "", f"float32, on {per}"),
        (
            "bytes per rank at rest", f"{measured.at_rest:,}", f"{costs.held_at_rest:,}", f"{costs.held_by_ddp:,}",
            f"{costs.held_in_words()} / {costs.ranks} (parameters, gradients, optimizer)",
        ),
        (
            "bytes per rank at peak", peak, "", f"{costs.held_by_ddp:,} +", above,
        ),
        (
            "bytes moved per step", f"{measured.moved_per_step:,}", f"{costs.moved_per_step:,}",
            f"{costs.moved_by_ddp:,}", costs.moved_in_words(),
        ),
        ("process memory at peak", f"{measured.process_peak:,}", "", "", "with Python, torch's libraries, the text"),
        ("milliseconds per step", f"{measured.step_milliseconds:.1f}", "", "", "median on rank 0"),
    ]  # fmt: skip
    return table(("", "this run", "formula", "DDP", ""), rows)
