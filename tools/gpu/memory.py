"""How much memory a step takes, by the allocator's own account, beside what docs/memory.md says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import torch
from attrs import asdict, define
from bench.contenders import Contender
from bench.memory import Allocator, Memory
from bench.training import Training, floor
from torch import Tensor

from .contenders import attempt, keeping, with_kept
from .emulated import RANKS
from .facts import Facts
from .formula import Units, full_shard, shard_grad_op
from .measurement import Measurement
from .place import Place, Plan, allocator_of, in_emulation
from .sizes import one_row_stack

COLLECTIONS: Final = 3
"""After each contender: what a finaliser lets go is only found by the next one."""


class Meter(Protocol):
    """Made before what is to be measured."""

    def during(self, action: Callable[[], object]) -> Memory:
        """The most bytes that were held while `action` ran, and those left in the end."""


@define
class DeviceMeter:
    """The account of the device's caching allocator."""

    place: Place
    base: int = 0

    def __attrs_post_init__(self) -> None:
        self.base = self.during(lambda: None).at_rest

    def during(self, action: Callable[[], object]) -> Memory:
        """See `Meter`."""
        device, counters = self.place.device, allocator_of(self.place.device)
        gc.collect()
        self.place.synchronise()
        counters.reset_peak_memory_stats(device)
        action()
        self.place.synchronise()
        peak, at_rest = counters.max_memory_allocated(device), counters.memory_allocated(device)
        return Memory(peak - self.base, at_rest - self.base)


def measure(place: Place, expandable: bool) -> dict[str, dict[str, Any]]:
    """A row for each contender: bytes at rest, and at the peaks of a forward and of a backward pass, and of pools."""
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    rows = {}
    gc.freeze()  # what has been imported need not be looked through each time
    workload, kept = one_row_stack(place.plan.tiny), keeping(RANKS)
    attempt(place, Contender(floor), workload)  # libraries for products take their workspaces, which stay
    gc.collect()
    for name, contender in with_kept(RANKS).items():
        pools(place.device, begin=True)
        meter: Meter = Allocator() if place.plan.on_cpu else DeviceMeter(place)
        made = attempt(place, contender, workload)
        rows[name] = {"error": made} if isinstance(made, str) else _row(place, made, meter) | {"keeps": name in kept}
        del made
        for _ in range(COLLECTIONS):
            gc.collect()
    return rows


def _row(place: Place, training: Training, meter: Meter) -> dict[str, Any]:
    losses: list[Tensor] = []
    rest = meter.during(place.group.barrier).at_rest
    forward = meter.during(lambda: losses.append(training.forward())).peak
    backward = meter.during(lambda: training.backward(losses.pop())).peak
    return {"rest": rest, "forward": forward, "backward": backward, **pools(place.device)}


def pools(device: torch.device, *, begin: bool = False) -> dict[str, float]:
    """Peaks of what the caching allocator gave out and held, in MB, and how often it freed all to try again.

    Empty where the allocator does not tell. With `begin` what it holds is freed first, and peaks begin anew.
    """
    counters: Any = None if device.type == "cpu" else allocator_of(device)
    if not hasattr(counters, "memory_stats"):
        return {}
    if begin:
        counters.empty_cache()
        counters.reset_peak_memory_stats(device)
    stats = counters.memory_stats(device)
    if "reserved_bytes.all.peak" not in stats:
        return {}
    allocated, reserved = (stats[f"{which}_bytes.all.peak"] / 1e6 for which in ("allocated", "reserved"))
    return {"allocated": allocated, "reserved": reserved, "retries": stats.get("num_alloc_retries", 0)}


def formulas(plan: Plan) -> dict[str, dict[str, int]]:
    """What the documentation says, in the same terms."""
    units = Units.of(one_row_stack(plan.tiny), RANKS)
    on_device = not plan.on_cpu
    return {
        "FULL_SHARD": asdict(full_shard(units, on_device=on_device)),
        "SHARD_GRAD_OP": asdict(shard_grad_op(units, on_device=on_device)),
    }


def _run(plan: Plan, facts: Facts, limit: float, *, expandable: bool = False) -> dict[str, Any]:
    rows = in_emulation(plan, limit, measure, expandable)
    return {"workload": one_row_stack(plan.tiny).what, "formulas": formulas(plan), "rows": rows}


def _only_of_cuda(plan: Plan, facts: Facts) -> str:
    return "" if plan.kind == "cuda" else "not on this device: it is a setting of CUDA's allocator"


MEASUREMENTS: Final = (
    Measurement(
        "memory",
        "Bytes of all tensors on the device of one of eight emulated ranks, by its allocator: at rest between two "
        "steps with AdamW, and at the peaks of a forward and of a backward pass, with one row of activations. The "
        "formulas are those of [memory and traffic](../memory.md), with the gradients that autograd makes and shards "
        "of gradients. What is reserved and not given out is fragmentation.",
        20,
        60,
        _run,
    ),
    Measurement(
        "memory, expandable segments",
        "The same with `expandable_segments:True`.",
        20,
        60,
        partial(_run, expandable=True),
        _only_of_cuda,
    ),
)
