"""Numbers and columns for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns", "shown_flops", "shown_nbytes", "shown_seconds"]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _scaled(value: float, units: Sequence[str]) -> str:
    number = 0
    # From 999.5 on, three digits of it would be 1000.
    while abs(value) >= (999.5 if number else 1000) and number < len(units) - 1:
        value, number = value / 1000, number + 1
    return f"{value:.0f} {units[0]}" if not number else f"{value:.3g} {units[number]}"


def shown_nbytes(nbytes: float) -> str:
    """A number of bytes: `1.23 GB`."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def shown_flops(flops: float) -> str:
    """A number of floating-point operations: `1.23 TFLOP`."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def shown_seconds(seconds: float) -> str:
    """A time: `1.23 ms`."""
    return _scaled(seconds * 1e6, ("µs", "ms", "s")) if seconds < 100 else f"{seconds:,.0f} s"
