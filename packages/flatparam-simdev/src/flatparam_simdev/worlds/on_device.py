"""A world of processes, each of which has a simulated device."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from flatparam_simdev import build
from flatparam_simdev.worlds.child import FunctionReference
from flatparam_simdev.worlds.process_world import run_processes

T = TypeVar("T")


@attrs.frozen(eq=False)
class World:
    """The facts that a rank is told.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
        device: the simulated device of this process.
        group: all ranks, over the simulated backend.
        cpu_group: all ranks, over gloo; torch's default group.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup


def run_on_device(world_size: int, function: Callable[..., T], *args: Any, timeout: float = 600) -> list[T]:
    """Run `function(world, *args)` in each of `world_size` processes with a device; returns the results in rank order.

    Function, arguments, results and errors are as for `run_processes`. A collective fails after half of `timeout`, in
    seconds.

    Raises:
        CannotBuild: where there is no compiler, or where it fails.
    """
    build.built()
    reference, payload = FunctionReference.of(function), pickle.dumps(args)
    return run_processes(
        world_size, _as_rank, reference, payload, timeout, timeout=timeout, pg_timeout=timeout / 2
    )


def _as_rank(collectives: Any, reference: FunctionReference, payload: bytes, timeout: float) -> Any:
    # The function's module first, as the arguments may be of its classes.
    function, args = reference.resolve(), pickle.loads(payload)
    from flatparam_simdev import device  # registers it, in this process only

    group = dist.new_group(backend=device.DEVICE.type, timeout=timedelta(seconds=timeout / 2))
    world = World(collectives.rank, collectives.size, device.DEVICE, group, collectives.group)
    return function(world, *args)
