"""Where a measurement runs: how many ranks, on which devices, over what."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from bench.absent import world
from bench.training import Setting
from bench.workloads import Workload

from flatparam_comm import Collectives, ProcessGroupCollectives, run_threads
from flatparam_comm.testing import run_processes

from .emulated import BACKEND, RANKS, EmulatedGroup

P = ParamSpec("P")
T = TypeVar("T")

MOST_RANKS: Final = 8
THREADS: Final = 2
"""The ranks of a world of threads on one device."""


@frozen
class Plan:
    """What the command line has asked for.

    Attributes:
        kind: of the device, as torch calls it: "cuda", "xpu", "cpu".
        ranks: processes, each of which has a device of its own (on the CPU: a core, perhaps).
        tiny: models so small that they only show that everything runs.
        seconds: for the rounds of one table of times.
        patience: what limits of time are multiplied by.
        imports: modules that make the device known to torch.
        out: the folder for results, of what is written by a rank itself.
    """

    kind: str
    ranks: int
    tiny: bool = False
    seconds: float = 20.0
    patience: float = 1.0
    imports: tuple[str, ...] = ()
    out: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether there is no accelerator."""
        return self.kind == "cpu"

    @property
    def where(self) -> str:
        """How the ranks run, in words."""
        if self.ranks == 1:
            return "a world of one process"
        return f"{self.ranks} processes" + ("" if self.on_cpu else ", a device each")


@frozen(eq=False)
class Place:
    """One rank of a world. `process_group` is what torch's own libraries take; None in a world of threads."""

    plan: Plan
    device: torch.device
    group: Collectives
    process_group: Any

    def setting(self, workload: Workload, *, bf16: bool = False) -> Setting:
        """What the benchmark's contenders are given here."""
        return Setting(workload, bf16, self.group, device=self.device, process_group=self.process_group)

    @property
    def emulated(self) -> EmulatedGroup:
        """The group of `in_emulation`."""
        assert isinstance(self.process_group, EmulatedGroup)
        return self.process_group

    def synchronise(self) -> None:
        """Have the host wait until the device has done all that it was given."""
        if not self.plan.on_cpu:
            torch.accelerator.synchronize(self.device)


def ranks_for(devices: int) -> int:
    """The largest power of two that there are devices for, at most eight.

    A mean over that many ranks only changes exponents, so that losses can be asked to be equal, bit for bit.
    """
    return min(MOST_RANKS, 1 << (max(devices, 1).bit_length() - 1))


def in_processes(
    plan: Plan, limit: float, measure: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """What `measure(place, ...)` returns in each of the plan's processes, within `limit` seconds.

    Each measurement has processes of its own, so that one that ends them ends no other.
    """
    seconds = limit * plan.patience
    call = (plan, seconds, measure, args, kwargs)
    return run_processes(plan.ranks, _as_process, *call, timeout=seconds, pg_timeout=seconds)


def in_threads(
    plan: Plan, limit: float, measure: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """What it returns in each rank of a world of threads, which share the first device (and are one process)."""
    seconds = limit * plan.patience
    call = (plan, seconds, measure, args, kwargs)
    (found,) = run_processes(1, _as_threads, *call, timeout=seconds, pg_timeout=seconds)
    return found


def in_emulation(
    plan: Plan, limit: float, measure: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What it returns in a world of eight ranks of which the others are not there: see `emulated.py`."""
    return _alone(plan, limit, BACKEND, measure, args, kwargs)


def without_communication(
    plan: Plan, limit: float, measure: Callable[Concatenate[Place, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The same over torch's process group that does nothing."""
    return _alone(plan, limit, "fake", measure, args, kwargs)


def _alone(plan: Plan, limit: float, backend: str, measure: Callable[..., T], args: Any, kwargs: Any) -> T:
    seconds = limit * plan.patience
    call = (plan, backend, measure, args, kwargs)
    found: list[T] = run_processes(1, _as_first, *call, timeout=seconds, pg_timeout=seconds)
    return found[0]


def told(error: BaseException) -> str:
    """An error in one line: the first of all that led to it."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"


def _as_process(
    gloo: Collectives,
    plan: Plan,
    seconds: float,
    measure: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    device = take_device(plan, gloo.rank)
    if plan.on_cpu:
        return measure(Place(plan, device, gloo, dist.group.WORLD), *args, **kwargs)
    backend = dist.get_default_backend_for_device(device)
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    return measure(Place(plan, device, ProcessGroupCollectives(group), group), *args, **kwargs)


def _as_first(
    gloo: Collectives,
    plan: Plan,
    backend: str,
    measure: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    device = take_device(plan, 0)
    with world(RANKS, backend) as group:
        return measure(Place(plan, device, group, dist.group.WORLD), *args, **kwargs)


def _as_threads(
    gloo: Collectives,
    plan: Plan,
    seconds: float,
    measure: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[T]:
    device = take_device(plan, 0)

    def as_rank(threads: Collectives) -> T:
        return measure(Place(plan, device, threads, None), *args, **kwargs)

    return run_threads(THREADS, as_rank, timeout=seconds)


def allocator_of(device: torch.device) -> Any:
    """What knows of the device's memory: `torch.accelerator`, or the device's own module where nobody reports there."""
    try:
        reports = bool(torch.accelerator.memory_stats(device))
    except RuntimeError:  # "Allocator for ... is not a DeviceAllocator"
        reports = False
    return torch.accelerator if reports else torch.get_device_module(device)


def take_device(plan: Plan, rank: int) -> torch.device:
    """This process's device, which is current from here on."""
    warnings.simplefilter("ignore")  # torch's FSDP1 warns at every turn
    for module in plan.imports:
        importlib.import_module(module)
    if plan.on_cpu:
        return torch.device("cpu")
    device = torch.device(plan.kind, rank)
    torch.accelerator.set_device_index(device)
    torch.zeros(1, device=device)  # what is lazy about a device happens here
    return device
