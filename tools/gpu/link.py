"""Training over eight emulated ranks and a link as slow as one likes: what hides, and what memory is held."""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import Any, Final

from bench.contenders import Contender
from bench.training import Training, floor
from bench.workloads import Workload

from .contenders import attempt, full_step, sharding, summing, with_kept
from .emulated import RANKS
from .facts import Facts
from .host import waits_in
from .measurement import Measurement, anywhere
from .memory import pools
from .place import Place, Plan, in_emulation
from .sizes import LARGEST, TINY, Size
from .steps import size_of

STEPS: Final = 5


def measure(place: Place, size: Size, ratio: float) -> dict[str, Any]:
    """A row for each contender, while the gather of a block takes `ratio` times the forward pass of it."""
    link, workload = place.emulated.link, size.workload
    plain = attempt(place, Contender(floor), workload, bf16=True)
    if isinstance(plain, str):
        raise RuntimeError(f"the plain model cannot be trained: {plain}")
    alone = seconds_of(place, plain)
    rate = set_link(place, size, alone, ratio)
    del plain
    rows: dict[str, dict[str, Any]] = {}
    chosen = with_kept(RANKS) | summing() if ratio == 1.0 else sharding(RANKS)
    for name, contender in chosen.items():
        gc.collect()
        pools(place.device, begin=True)
        link.rate = 0.0
        made = attempt(place, contender, workload, bf16=True)
        rows[name] = {"error": made} if isinstance(made, str) else _row(place, made, rate, alone)
        del made
    return {"plain": 1e3 * alone, "rows": rows}


def _row(place: Place, training: Training, rate: float, alone: float) -> dict[str, Any]:
    link = place.emulated.link
    before = link.sent
    full_step(training)
    wire = (link.sent - before) / rate if link.cycles else 0.0
    link.rate = rate
    took = seconds_of(place, training)
    return {
        "ms": 1e3 * took,
        "wire": 1e3 * wire,
        "bound": took / max(alone, wire),
        "waits": waits_in(place, partial(full_step, training)),
        **pools(place.device),
    }


def seconds_of(place: Place, training: Training) -> float:
    """The median of a few steps, each after the one before is over; the host runs ahead inside of it."""
    found = []
    for _ in range(STEPS):
        place.synchronise()
        begin = time.perf_counter()
        full_step(training)
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


def _run(plan: Plan, facts: Facts, limit: float, *, ratio: float) -> dict[str, Any]:
    size = TINY if plan.tiny else min(LARGEST, size_of(plan, facts, models=1), key=lambda each: each.width)
    found = in_emulation(plan, limit, measure, size, ratio)
    can_sleep = plan.kind == "cuda"
    return {
        "workload": f"{size.workload.what}, in bf16",
        "note": f"The plain model takes {found['plain']:.1f} ms. "
        + (
            "" if can_sleep else "Not on this device: only CUDA sleeps in a stream, so the wire took no time."
        ),
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


MEASUREMENTS: Final = tuple(
    Measurement(
        f"link, {ratio}",
        "A step over eight emulated ranks. Collectives follow one another in a stream of their own, as NCCL's do, and "
        f"take what a link would on which gathering a block takes {ratio} times the block's forward pass. Memory is "
        "that of one of eight ranks; retries are those of the allocator.",
        seconds,
        60,
        partial(_run, ratio=ratio),
        anywhere if ratio == 1.0 else _only_large,
    )
    for ratio, seconds in ((1.0, 40), (2.0, 25), (0.5, 25))
)
