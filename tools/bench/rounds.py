"""Times: all contenders in the same two processes, one step of each in turn, so that a busy machine is busy for all."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final

from flatparam_comm import Collectives

from .contenders import CONTENDERS
from .counts import count
from .training import Setting, Training
from .workloads import WORKLOADS

COLUMNS: Final = ("step", "forward", "backward", "update", "user", "system", "faults")
"""What is known of a step on a rank: seconds, of which in each part; seconds of CPU in all threads; minor faults."""

MOST_ROUNDS: Final = 200
LEAST_ROUNDS: Final = 5


def measure(
    group: Collectives, workload: str, bf16: bool, names: Sequence[str], seconds: float
) -> tuple[dict[str, dict[str, Any]], dict[str, list[list[float]]]]:
    """For each contender what `counts.count` finds on this rank, and its `COLUMNS` in as many rounds as fit.

    `seconds` is for the rounds; without any, nothing is timed.
    """
    warnings.simplefilter("ignore")  # torch's FSDP1 warns at every turn
    counted = {name: count(group, WORKLOADS[workload], bf16, CONTENDERS[name]) for name in names}
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    if not seconds:
        return counted, samples
    setting = Setting(WORKLOADS[workload], bf16, group)
    trainings = {name: CONTENDERS[name].build(setting) for name in names}
    for _ in range(2):  # lazy state of optimizers, pools, the order of execution
        start = time.perf_counter()
        for training in trainings.values():
            _timed(group, training)
        took = time.perf_counter() - start
    rounds = group.exchange(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / took))))[0]
    for _ in range(rounds):
        for name, training in trainings.items():
            samples[name].append(_timed(group, training))
    return counted, samples


def _timed(group: Collectives, training: Training) -> list[float]:
    """One step, from when both ranks are ready to when both are done."""
    group.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    loss = training.forward()
    forward = time.perf_counter()
    training.backward(loss)
    backward = time.perf_counter()
    training.update()
    update = time.perf_counter()
    group.barrier()
    end = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return [
        end - begin,
        forward - begin,
        backward - forward,
        update - backward,
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    ]
