"""What a unit costs the host on this device: what `python tools/bench host` measures on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from bench.host import costs
from bench.instructions import UNITS

from .facts import Facts
from .measurement import Measurement
from .place import Place, Plan, without_communication

TINY_UNITS: Final = 4


def measure(place: Place, parameters: int) -> dict[str, dict[str, Any]]:
    """A row for each contender."""
    units, seconds = (TINY_UNITS, 0.0) if place.plan.tiny else (UNITS, place.plan.seconds / 2)
    return costs(place.group, place.process_group, parameters, seconds, device=place.device, units=units)


def waits_in(place: Place, action: Callable[[], object]) -> int | None:
    """How often `action` makes the host wait for a stream, as torch tells for CUDA; None elsewhere."""
    if place.device.type != "cuda":
        return None
    place.synchronise()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


def _run(plan: Plan, facts: Facts, limit: float, *, parameters: int) -> dict[str, Any]:
    return {"rows": without_communication(plan, limit, measure, parameters)}


MEASUREMENTS: Final = tuple(
    Measurement(
        f"host, {parameters} parameters",
        "Microseconds of the host for each part of a step, per unit of so many parameters, one of eight ranks, over a "
        "process group that does nothing. The last columns are both passes on top of the plain model's. On an "
        "accelerator it is the time until all calls are made.",
        15,
        40,
        partial(_run, parameters=parameters),
    )
    for parameters in (4, 16, 32)
)
