"""Worlds of processes, each of which has a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import pytest
import torch
import torch.distributed as dist

from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_core import ALIGNMENT_NBYTES, CPU_ALIGNMENT_NBYTES
from integration_tests.simulated import build

T = TypeVar("T")


@attrs.frozen(eq=False)
class World:
    """What a rank is told.

    Attributes:
        group: all ranks, over the simulated backend.
        cpu_group: all ranks, over gloo; torch's default group.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup


def on_simulated(ranks: int, function: Callable[..., T], *args: Any) -> list[T]:
    """What ``function(world, *args)`` returns in each of that many processes.

    The function is at the top of a module that can be imported by its name; what it is given and returns is pickled.
    The test that calls this is skipped where the device cannot be compiled.
    """
    if reason := build.why_not():
        pytest.skip(reason)
    return run_processes(ranks, _as_rank, function, args, timeout=PATIENCE, pg_timeout=PATIENCE / 2)


def _as_rank(collectives: Any, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    from integration_tests.simulated import device  # registers it, in this process only

    group = dist.new_group(backend=device.NAME, timeout=timedelta(seconds=PATIENCE / 2))
    world = World(collectives.rank, collectives.size, device.DEVICE, group, collectives.group)
    # What a program does on the CPU is compared with what it does on the device, bit for bit: in one layout.
    with CPU_ALIGNMENT_NBYTES.set_to(ALIGNMENT_NBYTES.value):
        return function(world, *args)
