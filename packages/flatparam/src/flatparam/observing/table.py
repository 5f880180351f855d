"""Numbers and columns for people."""

from __future__ import annotations

from collections.abc import Sequence

from flatparam.addons import load

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


def shown_nbytes(nbytes: float) -> str:
    """Return a number of bytes: `1.23 GB`."""
    return str(load("flatparam_files.command").shown_nbytes(nbytes))


def shown_flops(flops: float) -> str:
    """Return a number of floating-point operations: `1.23 TFLOP`."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def shown_seconds(seconds: float) -> str:
    """Return a time: `1.23 ms`."""
    return _scaled(seconds * 1e6, ("µs", "ms", "s")) if seconds < 100 else f"{seconds:,.0f} s"


def _scaled(value: float, units: Sequence[str]) -> str:
    return str(load("flatparam_files.command").scaled(value, units))
