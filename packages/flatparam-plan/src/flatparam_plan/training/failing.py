"""Errors of the program that is planned: of its model, its inputs, its optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from flatparam_plan.errors import PlanError

__all__ = ["runs"]

_OURS: Final = (
    "flatparam",
    "flatparam_comm",
    "flatparam_core",
    "flatparam_plan",
    "flatparam_runtime",
    "flatparam_state",
)


@contextlib.contextmanager
def runs(what: str, advice: str = "") -> Iterator[None]:
    """Inside, an exception is told as one of the program.

    Args:
        what: the part of the program that runs inside.
        advice: how to mend what most likely is wrong there.

    Raises:
        PlanError: instead of the exception, which is its cause.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        told = f"expected a program that runs, found that {what} raises {type(error).__name__}: {error}"
        raise PlanError("; ".join(filter(None, (told + _place_of(error), advice)))) from error


def _place_of(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours, to read after the error's own text."""
    libraries = [Path(torch.__file__).parent]
    for name in _OURS:
        found = importlib.util.find_spec(name)
        libraries += [] if found is None or found.origin is None else [Path(found.origin).parent]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # What Python has made itself is in no file.
        if os.path.isabs(frame.filename) and not any(map(Path(frame.filename).is_relative_to, libraries)):
            return f" (line {frame.lineno} of {frame.filename}, in {frame.name})"
    return ""
