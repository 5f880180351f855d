"""Other steps, and what is beside a step: accumulation, Muon, averages of weights, a model that moves to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench.training import Training
from bench.workloads import stack

import flatparam
from flatparam.optim import Muon

from .contenders import sharded_alone
from .facts import Facts
from .host import waits_in
from .measurement import Measurement
from .place import Place, Plan, in_processes, told
from .sizes import COMPILED, TINY

MICRO_BATCHES: Final = 4
WIDTH: Final = 16384
"""Of a layer whose parameters take a GiB in fp32; eight of them are moved."""


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """A row for each; the model is sharded over the ranks, and over one through the backend too."""
    training = sharded_alone(place.setting((TINY if place.plan.tiny else COMPILED).workload), use_orig_params=True)
    average = flatparam.ShardedEMA(training.model, 0.999)
    rows = {
        "a step with AdamW": _row(place, partial(_step, training)),
        f"accumulation of {MICRO_BATCHES}": _row(place, partial(_accumulated, training)),
        "ShardedEMA.update()": _row(place, average.update),
    }
    training.optimizer = Muon(training.model.named_parameters())
    rows["a step with Muon"] = _row(place, partial(_step, training))
    return rows


def measure_moving(place: Place) -> dict[str, dict[str, Any]]:
    """Seconds of `offload()` and `onload()`, twice each: the first time takes the host's memory."""
    width = 64 if place.plan.tiny else WIDTH
    training = sharded_alone(place.setting(stack(units=8, width=width, depth=1, rows=1)))
    nbytes = sum(p.nbytes for p in training.model.parameters())
    rows = {}
    for turn in ("first", "second"):
        for move in (flatparam.offload, flatparam.onload):
            row = _row(place, partial(move, training.model), times=1)
            if "ms" in row:
                row["rate"] = nbytes / 1e6 / row["ms"]
            rows[f"{move.__name__}(), {turn} time"] = row
    return rows


def _step(training: Training) -> None:
    training.backward(training.forward())
    training.update()


def _accumulated(training: Training) -> None:
    model: Any = training.model
    with model.no_sync():
        for _ in range(MICRO_BATCHES - 1):
            training.backward(training.forward())
    _step(training)


def _row(place: Place, action: Callable[[], object], times: int = 3) -> dict[str, Any]:
    """Milliseconds, at best, and how often the host waited."""
    try:
        found = []
        for _ in range(times):
            place.synchronise()
            begin = time.perf_counter()
            action()
            place.synchronise()
            found.append(time.perf_counter() - begin)
        waits = waits_in(place, action) if times > 1 else None
    except Exception as error:
        return {"error": told(error)}
    return {"ms": 1e3 * min(found), "waits": waits}


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    return {
        "workload": (TINY if plan.tiny else COMPILED).workload.what,
        "columns": {"ms": "ms", "waits": "waits of the host"},
        "rows": in_processes(plan, limit, measure)[0],
    }


def _run_moving(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    rows = in_processes(plan, limit, measure_moving)[0]
    return {"columns": {"ms": "ms", "rate": "GB/s"}, "rows": rows}


MEASUREMENTS: Final = (
    Measurement(
        "others, offload() of 8 GB",
        "`flatparam.offload` and `onload` of a model of 8 GB, twice.",
        15,
        50,
        _run_moving,
    ),
    Measurement(
        "others",
        "Steps of a GPT in fp32, and an update of the average of its weights, sharded over the ranks that there are.",
        20,
        50,
        _run,
    ),
)
