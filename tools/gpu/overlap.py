"""What is hidden behind computing, by torch's profiler: collectives, and copies of what is offloaded."""

from __future__ import annotations

import gc
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict
from bench.contenders import Contender
from bench.training import Training, floor

from .contenders import Step, attempt, full_step, offloading, passes, sharding
from .emulated import RANKS
from .facts import Facts
from .link import seconds_of, set_link
from .measurement import Measurement, not_on_cpu
from .place import Place, Plan, allocator_of, in_emulation, told
from .sizes import Size
from .steps import size_of
from .timeline import STEP, timeline

PRECISION: Final = "bf16"
"""Computing is shorter than in fp32, and so harder to hide behind."""


def measure(place: Place, size: Size, profile: str) -> dict[str, dict[str, Any]]:
    """A row for each contender: the timeline of one step of this rank. The first one's profile is written, too."""
    rows: dict[str, dict[str, Any]] = {}
    plain = attempt(place, Contender(floor), size.workload, bf16=True)
    if isinstance(plain, Training):
        set_link(place, size, seconds_of(place, plain), 1.0)
    del plain
    for chosen, step in ((sharding(RANKS), full_step), (offloading(RANKS), passes)):
        for name, contender in chosen.items():
            made = attempt(place, contender, size.workload, bf16=True, step=step)
            rows[name] = {"error": made} if isinstance(made, str) else _row(place, made, step, profile)
            profile = ""
            del made
            gc.collect()
            allocator_of(place.device).empty_cache()
    return rows


def _row(place: Place, training: Training, step: Step, profile: str) -> dict[str, Any]:
    trace = _trace(place, training, step)
    if profile:
        Path(profile).write_bytes(gzip.compress(json.dumps(trace).encode()))
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
    profile = Path(plan.out, f"{facts.slug}-profile.json.gz").resolve()
    rows = in_emulation(plan, limit, measure, size, str(profile))
    return {"workload": size.workload.what, "precision": PRECISION, "rows": rows}


MEASUREMENTS: Final = (
    Measurement(
        "overlap",
        "One step of one of eight emulated ranks in a profile, computing in bf16, over the link on which the gather of "
        "a block takes as long as its forward pass: how long the device was busy with collectives, and with copies "
        "from and to the host, and how much of that time its computing stream ran kernels. Offloaded models are not "
        "stepped, as their optimizer is the CPU's.",
        35,
        80,
        _run,
        not_on_cpu,
    ),
)
