"""How much memory a step takes, by the allocator's own account, beside what docs/memory.md says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final, Protocol

from attrs import asdict, define
from bench.contenders import Contender
from bench.memory import Allocator, Memory
from bench.training import Training, floor
from torch import Tensor

from .contenders import attempt, keeping, sharding
from .facts import Facts
from .formula import Units, full_shard, shard_grad_op
from .measurement import Measurement
from .place import Place, Plan, allocator_of, in_processes
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


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """A row for each contender: bytes at rest, and at the peaks of a forward and of a backward pass."""
    rows = {}
    gc.freeze()  # what has been imported need not be looked through each time
    workload, kept = one_row_stack(place.plan.tiny), keeping(place.group.size)
    attempt(place, Contender(floor), workload)  # libraries for products take their workspaces, which stay
    gc.collect()
    for name, contender in {**sharding(place.group.size), **kept}.items():
        meter: Meter = Allocator() if place.plan.on_cpu else DeviceMeter(place)
        made = attempt(place, contender, workload)
        rows[name] = (
            {"error": made} if isinstance(made, str) else _row(place, made, meter) | {"keeps": name in kept}
        )
        del made
        for _ in range(COLLECTIONS):
            gc.collect()
    return rows


def _row(place: Place, training: Training, meter: Meter) -> dict[str, Any]:
    losses: list[Tensor] = []
    rest = meter.during(place.group.barrier).at_rest
    forward = meter.during(lambda: losses.append(training.forward())).peak
    backward = meter.during(lambda: training.backward(losses.pop())).peak
    return {"rest": rest, "forward": forward, "backward": backward}


def formulas(plan: Plan) -> dict[str, dict[str, int]]:
    """What the documentation says, in the same terms."""
    units = Units.of(one_row_stack(plan.tiny), plan.ranks)
    on_device = not plan.on_cpu
    return {
        "FULL_SHARD": asdict(full_shard(units, on_device=on_device)),
        "SHARD_GRAD_OP": asdict(shard_grad_op(units, on_device=on_device)),
    }


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    (first, *_) = in_processes(plan, limit, measure)
    return {"workload": one_row_stack(plan.tiny).what, "formulas": formulas(plan), "rows": first}


MEASUREMENTS: Final = (
    Measurement(
        "memory",
        "Bytes of all tensors on the device of rank 0, by its allocator: at rest between two steps with AdamW, and "
        "at the peaks of a forward and of a backward pass, with one row of activations. The formulas are "
        "those of [memory and traffic](../memory.md), with the gradients that autograd makes and the shards of "
        "gradients. In a world of one process flatparam and FSDP1 do not shard, and the formulas are for who does.",
        30,
        70,
        _run,
    ),
)
