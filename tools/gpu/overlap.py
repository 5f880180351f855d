"""What is hidden behind computing, by torch's profiler: collectives, and copies of what is offloaded."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict
from bench.training import Training

from .contenders import Step, attempt, full_step, offloading, passes, sharding, told
from .facts import Facts
from .measurement import Measurement, not_on_cpu
from .place import Place, Plan, allocator_of, in_processes
from .sizes import Size
from .steps import size_of
from .timeline import STEP, timeline

PRECISION: Final = "bf16"
"""Computing is shorter than in fp32, and so harder to hide behind."""


def measure(place: Place, size: Size) -> dict[str, dict[str, Any]]:
    """A row for each contender: the timeline of one step of this rank."""
    rows: dict[str, dict[str, Any]] = {}
    ranks = place.group.size
    for chosen, step in ((sharding(ranks), full_step), (offloading(ranks), passes)):
        for name, contender in chosen.items():
            made = attempt(place, contender, size.workload, bf16=True, step=step)
            rows[name] = {"error": made} if isinstance(made, str) else _row(place, made, step)
            del made
            gc.collect()
            allocator_of(place.device).empty_cache()
    return rows


def _row(place: Place, training: Training, step: Step) -> dict[str, Any]:
    trace = _trace(place, training, step)
    try:
        return asdict(timeline(trace))
    except LookupError as error:
        return {"error": told(error)}


def _trace(place: Place, training: Training, step: Step) -> dict[str, Any]:
    """The trace of a step; the profiler runs twice, as it sets itself up in its first run."""
    for _ in range(2):
        place.group.barrier()
        with torch.profiler.profile() as profile:
            with torch.profiler.record_function(STEP):
                step(training)
            place.synchronise()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return trace


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    size = size_of(plan, facts, models=3, offload=True)
    found = in_processes(plan, limit, measure, size)
    return {"workload": size.workload.what, "precision": PRECISION, "rows": found[0]}


MEASUREMENTS: Final = (
    Measurement(
        "overlap",
        "One step of rank 0 in a profile, computing in bf16: how long the device was busy with collectives, and with "
        "copies from and to the host, and how much of that time its computing stream ran kernels. A collective's time "
        "includes what it waits for other ranks. Offloaded models are not stepped, as their optimizer is the CPU's.",
        60,
        110,
        _run,
        not_on_cpu,
    ),
)
