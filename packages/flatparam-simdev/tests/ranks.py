"""Worlds of processes with a simulated device, for the tests of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from flatparam_comm.testing import PATIENCE
from flatparam_simdev import why_not
from flatparam_simdev.worlds import run_on_device

T = TypeVar("T")


def on_simulated(ranks: int, function: Callable[..., T], *args: Any) -> list[T]:
    """What `run_on_device` returns; skips the test where the device cannot be compiled."""
    if reason := why_not():
        pytest.skip(reason)
    return run_on_device(ranks, function, *args, timeout=PATIENCE)
