"""Blocks that are compiled: how long a step is, and what torch compiles again after the second one."""

from __future__ import annotations

from typing import Any, Final

import torch
from bench.training import Training
from bench.workloads import Workload

from .contenders import PLAIN, attempt, full_step, with_plain
from .emulated import RANKS
from .facts import Facts
from .measurement import Measurement
from .place import Place, Plan, in_emulation, told
from .sizes import COMPILED, TINY
from .steps import seconds_of

NAMES: Final = (PLAIN, "flatparam, original", "flatparam, fully_shard", "torch FSDP2")


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """A row for each contender: a step without and with compiled blocks, over eight emulated ranks."""
    workload, rows = (TINY if place.plan.tiny else COMPILED).workload, {}
    for name in NAMES:
        torch._dynamo.reset()
        made = attempt(place, with_plain(RANKS)[name], workload)
        try:
            rows[name] = _row(place, made, workload) if isinstance(made, Training) else {"error": made}
        except Exception as error:
            rows[name] = {"error": told(error)}
        del made
    return rows


def _row(place: Place, training: Training, workload: Workload) -> dict[str, Any]:
    eager = seconds_of(place, training)
    begin, breaks = _graphs(), _breaks()
    for unit in [module for module in training.model.modules() if isinstance(module, workload.unit)]:
        unit.compile(backend=_backend(place.plan))
    for _ in range(2):
        full_step(training)
    before = _graphs()
    took = seconds_of(place, training)
    return {
        "eager": 1e3 * eager,
        "ms": 1e3 * took,
        "graphs": before - begin,
        "again": _graphs() - before,
        "breaks": _breaks() - breaks,
    }


def _breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _backend(plan: Plan) -> str:
    return "inductor" if plan.kind in ("cuda", "xpu") else "aot_eager"  # there it is kernels that are compared


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    return {
        "workload": (TINY if plan.tiny else COMPILED).workload.what,
        "note": f"The backend is {_backend(plan)}.",
        "columns": {
            "eager": "ms a step, eager",
            "ms": "ms a step, compiled",
            "graphs": "graphs",
            "again": "graphs after the second step",
            "breaks": "breaks",
        },
        "rows": in_emulation(plan, limit, measure),
    }


MEASUREMENTS: Final = (
    Measurement(
        "compiled",
        "A step in fp32 over eight emulated ranks, each block compiled after it was sharded.",
        30,
        100,
        _run,
    ),
)
