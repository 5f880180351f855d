"""Worlds of processes, each of which has a simulated device, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from flatparam_comm.testing import PATIENCE
from flatparam_core import ALIGNMENT_NBYTES, CPU_ALIGNMENT_NBYTES
from flatparam_simdev import why_not
from flatparam_simdev.worlds import World, run_on_device

__all__ = ["World", "on_simulated"]

T = TypeVar("T")


def on_simulated(ranks: int, function: Callable[..., T], *args: Any) -> list[T]:
    """What ``function(world, *args)`` returns in each of that many processes.

    The function is at the top of a module that can be imported by its name; what it is given and returns is pickled.
    The test that calls this is skipped where the device cannot be compiled.
    """
    if reason := why_not():
        pytest.skip(reason)
    return run_on_device(ranks, _in_one_layout, function, args, timeout=PATIENCE)


def _in_one_layout(world: World, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    # What a program does on the CPU is compared with what it does on the device, bit for bit: in one layout.
    with CPU_ALIGNMENT_NBYTES.set_to(ALIGNMENT_NBYTES.value):
        return function(world, *args)
