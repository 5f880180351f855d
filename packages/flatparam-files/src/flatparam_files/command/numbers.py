"""Numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["scaled", "shown_nbytes"]


def scaled(value: float, units: Sequence[str]) -> str:
    """A number in the unit that leaves three digits of it; each unit is 1,000 of the one before."""
    number = 0
    # From 999.5 on, three digits of it would be 1000.
    while abs(value) >= (999.5 if number else 1000) and number < len(units) - 1:
        value, number = value / 1000, number + 1
    return f"{value:.0f} {units[0]}" if not number else f"{value:.3g} {units[number]}"


def shown_nbytes(nbytes: float) -> str:
    """A number of bytes: `1.23 GB`."""
    return scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))
