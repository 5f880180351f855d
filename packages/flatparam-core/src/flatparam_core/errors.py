"""The errors that the flat parameter raises, and warnings that point at the line of the program that led to them."""

from __future__ import annotations

import sys
import warnings


class FlatParamError(RuntimeError):
    """The base class of the errors of the flat-parameter library; catch it to catch all of them."""


class LayoutError(FlatParamError, ValueError):
    """A layout, a span or a parameter that does not fit where it was to be placed."""


class IllegalStepError(FlatParamError):
    """A state machine was asked for a step that is not in its table."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, as `warnings.warn` does, at the innermost line that is not of these packages, torch or `contextlib`."""
    level, frame = 2, sys._getframe(1)
    # What a library has generated has no name.
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "torch")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_between(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("torch", "flatparam", "contextlib") or package.startswith("flatparam_")
