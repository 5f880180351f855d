"""How long a step takes: everybody in the same processes, a few steps of each in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from bench.figures import quartiles_of_ratios
from bench.training import Training

from .contenders import REFERENCE, Step, attempt, full_step, offloading, passes, sharding, with_plain
from .facts import Facts
from .measurement import Measurement, not_on_cpu
from .place import Place, Plan, in_processes
from .sizes import BYTES_ON_HOST, TINY, Size, size_for

STEPS_IN_A_ROUND: Final = 3
LEAST_ROUNDS: Final = 4
MOST_ROUNDS: Final = 100

Found = dict[str, list[float] | str]
"""Of each contender the seconds of a step in each round, or why there are none."""


def measure(place: Place, size: Size, *, bf16: bool, offload: bool) -> Found:
    """What this rank sees. An offloaded model's optimizer runs on the CPU, and is left out."""
    ranks, step = place.group.size, passes if offload else full_step
    # The whole model of somebody who does not shard it may not fit.
    chosen = offloading(ranks) if offload else with_plain(ranks) if ranks == 1 else sharding(ranks)
    found: Found = {}
    trainings: dict[str, Training] = {}
    for name, contender in chosen.items():
        made = attempt(place, contender, size.workload, bf16=bf16, step=step)
        found[name] = made if isinstance(made, str) else []
        if isinstance(made, Training):
            trainings[name] = made
    took = sum(_timed(place, training, step) for training in trainings.values()) * STEPS_IN_A_ROUND
    fitting = int(place.plan.seconds / took) if took else 0
    rounds = place.group.exchange(min(MOST_ROUNDS, max(LEAST_ROUNDS, fitting)))[0]
    for _ in range(rounds):
        for name, training in trainings.items():
            seconds = found[name]
            assert isinstance(seconds, list)
            seconds.append(_timed(place, training, step))
    return found


def joined(of_ranks: Sequence[Found], reference: str) -> dict[str, dict[str, Any]]:
    """A row for each contender; a step takes as long as on the slowest rank, and ratios are taken round by round."""
    slowest: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in of_ranks[0]:
        samples = [rank[name] for rank in of_ranks]
        errors = [each for each in samples if isinstance(each, str)]
        if errors:
            rows[name] = {"error": errors[0]}
            continue
        slowest[name] = [max(each) for each in zip(*samples, strict=True)]
        rows[name] = {"ms": 1e3 * statistics.median(slowest[name]), "rounds": len(slowest[name])}
    for name, seconds in slowest.items():
        if reference in slowest:
            rows[name]["ratio"] = quartiles_of_ratios(seconds, slowest[reference])
    return rows


def _timed(place: Place, training: Training, step: Step) -> float:
    """Seconds of a step, of some that the host may run ahead in, from when all are ready to when this rank is done."""
    place.synchronise()
    place.group.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS_IN_A_ROUND):
        step(training)
    place.synchronise()
    return (time.perf_counter() - begin) / STEPS_IN_A_ROUND


def size_of(plan: Plan, facts: Facts, *, models: int, offload: bool = False) -> Size:
    """A model of which so many fit at once; an offloaded one is held by the memory of the host."""
    if plan.tiny:
        return TINY
    on_device = size_for(facts.free_nbytes, models, plan.ranks)
    if not offload:
        return on_device
    on_host = size_for(facts.host_nbytes, models, 1, BYTES_ON_HOST)
    return min(on_device, on_host, key=lambda size: size.width)


def _run(
    plan: Plan, facts: Facts, limit: float, *, bf16: bool = False, offload: bool = False
) -> dict[str, Any]:
    size = size_of(plan, facts, models=3 if offload else 6, offload=offload)
    found = in_processes(plan, limit, measure, size, bf16=bf16, offload=offload)
    reference = f"{REFERENCE}, offload" if offload else REFERENCE
    return {
        "workload": size.workload.what,
        "reference": reference,
        "rows": joined(found, reference),
    }


_HOW: Final = (
    "A round is three steps of each in turn, in the same processes; a ratio is taken in each round. "
)

MEASUREMENTS: Final = (
    Measurement(
        "steps, bf16",
        _HOW + "Parameters and AdamW are in fp32, computing and reductions in bf16.",
        40,
        80,
        partial(_run, bf16=True),
    ),
    Measurement(
        "steps, offload",
        _HOW
        + "Shards and gradients are in the host's memory; forward and backward passes in fp32, without the optimizer, "
        "which would run on the CPU.",
        40,
        80,
        partial(_run, offload=True),
        not_on_cpu,
    ),
)
