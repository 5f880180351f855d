"""How long steps are, over eight emulated ranks and a link as slow as one likes, and over the ranks that there are."""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from bench.contenders import Contender
from bench.training import Training, floor
from bench.workloads import Workload

from .contenders import Step, attempt, exact, full_step, offloading, passes, sharding, summing, with_kept
from .emulated import RANKS
from .facts import Facts
from .host import waits_in
from .measurement import Measurement, anywhere
from .memory import pools
from .place import Place, Plan, in_emulation, in_processes
from .sizes import Size, size_of

STEPS: Final = 15
PROFILED: Final = "flatparam"


def measure(place: Place, size: Size, ratio: float | None, profile: str) -> dict[str, Any]:
    """A row for each contender; the gather of a block takes `ratio` times its forward pass, or what it takes."""
    plain = attempt(place, Contender(floor), size.workload, bf16=True)
    if isinstance(plain, str):
        raise RuntimeError(f"the plain model cannot be trained: {plain}")
    alone = seconds_of(place, plain)
    rate = None if ratio is None else set_link(place, size, alone, ratio)
    del plain
    ranks = place.group.size
    chosen = with_kept(ranks) | summing() | exact(ranks) if ratio == 1.0 else sharding(ranks)
    if ratio == 1.0 and not place.plan.on_cpu:
        chosen |= offloading(ranks)
    rows: dict[str, dict[str, Any]] = {}
    for name, contender in chosen.items():
        gc.collect()
        pools(place.device, begin=True)
        step = passes if "offload" in name else full_step
        made = attempt(place, contender, size.workload, bf16=True, step=step)
        rows[name] = {"error": made} if isinstance(made, str) else _row(place, made, step, rate, alone)
        if ratio == 1.0 and name == PROFILED and isinstance(made, Training):
            _profile(place, made, profile)
        del made
    return {"plain": 1e3 * alone, "rows": rows}


def _row(place: Place, training: Training, step: Step, rate: float | None, alone: float) -> dict[str, Any]:
    wire = 0.0 if rate is None else _on_the_wire(place, training, step) / rate
    took = seconds_of(place, training, step)
    return {
        "ms": 1e3 * took,
        "wire": None if rate is None else 1e3 * wire,
        "bound": took / max(alone, wire),
        "waits": waits_in(place, partial(step, training)),
        **pools(place.device),
    }


def _profile(place: Place, training: Training, file: str) -> None:
    """Write what torch's profiler sees of a step; it runs twice, as it sets itself up in its first run."""
    for _ in range(2):
        with torch.profiler.profile() as profile:
            full_step(training)
            place.synchronise()
    profile.export_chrome_trace(file)


def _on_the_wire(place: Place, training: Training, step: Step) -> float:
    """The bytes of a step, where they take any time."""
    link = place.emulated.link
    before = link.sent
    step(training)
    return link.sent - before if link.cycles else 0.0


def seconds_of(place: Place, training: Training, step: Step = full_step) -> float:
    """The median of a few steps, each after the one before is over; the host runs ahead inside of it."""
    found = []
    for _ in range(STEPS):
        place.synchronise()
        place.group.barrier()
        begin = time.perf_counter()
        step(training)
        place.synchronise()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def set_link(place: Place, size: Size, step: float, ratio: float) -> float:
    """Make the link that slow, and return its rate; of the plain model's `step` a third is the forward pass."""
    link = place.emulated.link
    link.measure_clock(place.device)
    link.rate = gathered_nbytes(size.workload) / (step / 3 / size.layers * ratio)
    return link.rate


def gathered_nbytes(workload: Workload) -> float:
    """What a rank gets on the wire for a unit of the first kind, in bf16."""
    unit = next(module for module in workload.model().modules() if isinstance(module, workload.unit))
    return 2 * sum(p.numel() for p in unit.parameters()) * (RANKS - 1) / RANKS


def _only_large(plan: Plan, facts: Facts) -> str:
    return "not with models so small: one link is enough to try" if plan.tiny else ""


def _run(plan: Plan, facts: Facts, limit: float, *, ratio: float | None) -> dict[str, Any]:
    size = size_of(plan, facts)
    if ratio is None:
        found = in_processes(plan, limit, measure, size, None, "")[0]
    else:
        profile = Path(plan.out, f"{facts.slug}-profile.json.gz").resolve()
        found = in_emulation(plan, limit, measure, size, ratio, str(profile))
    note = f"The plain model takes {found['plain']:.1f} ms."
    if ratio is not None and plan.kind != "cuda":
        note += " Not on this device: only CUDA sleeps in a stream, so the wire took no time."
    return {
        "workload": f"{size.workload.what}, in bf16",
        "note": note,
        "columns": {
            "ms": "ms a step",
            "wire": "ms on the wire",
            "bound": "x the longer of plain and wire",
            "allocated": "peak, MB",
            "reserved": "reserved, MB",
            "retries": "retries",
            "waits": "waits of the host",
        },
        "rows": found["rows"],
    }


MEASUREMENTS: Final = (
    *(
        Measurement(
            f"link, {ratio}",
            "A step over eight emulated ranks. Collectives follow one another in a stream of their own, as NCCL's do, "
            f"and take what a link would on which gathering a block takes {ratio} times the block's forward pass. "
            "Memory is that of one of eight ranks; retries are those of the allocator. Offloaded models are not "
            "stepped, as their optimizer is the CPU's.",
            seconds,
            90,
            partial(_run, ratio=ratio),
            anywhere if ratio == 1.0 else _only_large,
        )
        for ratio, seconds in ((1.0, 55), (2.0, 25), (0.5, 25))
    ),
    Measurement(
        "steps",
        "The same over the ranks that there are and the device's own backend.",
        25,
        60,
        partial(_run, ratio=None),
    ),
)
