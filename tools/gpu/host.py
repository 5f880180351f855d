"""What a unit costs the host, where kernels are so short that the device waits for it."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from bench.contenders import Contender
from bench.counts import without_collector
from bench.training import Training, floor

from .contenders import PLAIN, attempt, full_step, sharding
from .facts import Facts
from .measurement import Measurement
from .place import Place, Plan, in_processes
from .sizes import HOST_UNITS, units_of_nothing

MOST_ROUNDS: Final = 200
LEAST_ROUNDS: Final = 5


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """For each contender what this rank's host takes for a step, in microseconds, and how often it waits."""
    workload = units_of_nothing(place.plan.tiny)
    chosen = {PLAIN: Contender(floor), **sharding(place.group.size)}
    made = {name: attempt(place, contender, workload) for name, contender in chosen.items()}
    trainings = {name: each for name, each in made.items() if isinstance(each, Training)}
    queued: dict[str, list[float]] = {name: [] for name in trainings}
    with without_collector():
        took = sum(_queue(place, training) for training in trainings.values())
        fitting = int(place.plan.seconds / took) if took else 0
        for _ in range(place.group.exchange(min(MOST_ROUNDS, max(LEAST_ROUNDS, fitting)))[0]):
            for name, training in trainings.items():
                queued[name].append(_queue(place, training))
    waits = {name: synchronisations(place, training) for name, training in trainings.items()}
    return {
        name: {"error": each}
        if isinstance(each, str)
        else {"us": 1e6 * statistics.median(queued[name]), "waits": waits[name]}
        for name, each in made.items()
    }


def with_units(rows: Mapping[str, Mapping[str, Any]], units: int) -> dict[str, dict[str, Any]]:
    """The rows with microseconds per unit, on top of what the plain model takes."""
    plain = rows.get(PLAIN, {}).get("us")
    found = {name: dict(row) for name, row in rows.items()}
    for row in found.values():
        if "us" in row and plain is not None:
            row["us_per_unit"] = (row["us"] - plain) / units
    return found


def _queue(place: Place, training: Training) -> float:
    """Seconds until the host has made all calls of a step."""
    place.synchronise()
    place.group.barrier()
    begin = time.perf_counter()
    full_step(training)
    return time.perf_counter() - begin


def synchronisations(place: Place, training: Training) -> int | None:
    """How often a step makes the host wait for a stream, as torch tells for CUDA; None elsewhere."""
    if place.device.type != "cuda":
        return None
    place.synchronise()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            full_step(training)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    (first, *_) = in_processes(plan, limit, measure)
    workload = units_of_nothing(plan.tiny)
    units = 4 if plan.tiny else HOST_UNITS
    return {"workload": workload.what, "rows": with_units(first, units)}


MEASUREMENTS: Final = (
    Measurement(
        "host",
        "Microseconds until the host of rank 0 has made all calls of a step, with units so small that it is what takes "
        "the time; and per unit, on top of what the plain model takes. Waits are those that torch reports for CUDA: an "
        "event that the host waits for is not among them, and is in the table of what is hidden.",
        30,
        60,
        _run,
    ),
)
