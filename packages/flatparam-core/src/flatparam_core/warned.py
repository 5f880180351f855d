"""Warnings that point at the line of the program that led to them, however many functions lie between."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_caller"]

_BETWEEN = ("flatparam", "torch")
"""The packages between the program and a warning: those whose names begin so."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, as `warnings.warn` does, at the innermost line that is neither of these packages nor of torch."""
    level, frame = 2, sys._getframe(1)
    # What a library has generated has no name.
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
