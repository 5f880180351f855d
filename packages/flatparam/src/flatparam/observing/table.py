"""Numbers and columns for people."""

from __future__ import annotations

from collections.abc import Sequence

from flatparam_files.command import scaled, shown_nbytes

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


def shown_flops(flops: float) -> str:
    """A number of floating-point operations: `1.23 TFLOP`."""
    return scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def shown_seconds(seconds: float) -> str:
    """A time: `1.23 ms`."""
    return scaled(seconds * 1e6, ("µs", "ms", "s")) if seconds < 100 else f"{seconds:,.0f} s"
