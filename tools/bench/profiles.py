"""Where a step's time goes on one rank, by whose code it is: what stands between a contender and the floor."""

from __future__ import annotations

import cProfile
import pstats
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flatparam_comm import Collectives

from .contenders import CONTENDERS
from .training import Setting, Training
from .workloads import WORKLOADS

NAMES: Final = ("floor", "flatparam, original, shared memory", "flatparam, original", "torch FSDP1, original")
STEPS: Final = 8

ENGINE: Final = "autograd's engine: kernels of the backward pass"
WAITING: Final = "waiting for the other rank"
OTHERS: Final = "anything else"
_OWNERS: Final = {
    "/flatparam_comm/shared_waiting": WAITING,
    "/flatparam_core/": "flatparam_core: views, copies, gradients, memory",
    "/flatparam_comm/": "flatparam_comm: collectives",
    "/flatparam_runtime/": "flatparam_runtime: hooks and order",
    "/flatparam/": "flatparam: the wrapper",
    "/torch/distributed/": "torch.distributed",
    "/torch/optim/": "the optimizer",
    "/torch/": "modules and kernels of the forward pass",
    "/tools/": "modules and kernels of the forward pass",
}
"""By a part of the path of a file, the first that fits."""


def profile(
    group: Collectives, workload: str, names: Sequence[str] = NAMES, steps: int = STEPS
) -> dict[str, dict[str, float]]:
    """For each contender, milliseconds of a step by whose code runs; fp32.

    A function of C is counted with who calls it, but for the engine's run and what waits.
    """
    warnings.simplefilter("ignore")
    setting = Setting(WORKLOADS[workload], False, group)
    return {name: _owned(CONTENDERS[name].build(setting), group, steps) for name in names}


def _owned(training: Training, group: Collectives, steps: int) -> dict[str, float]:
    for _ in range(3):
        training.step()
    profiler = cProfile.Profile()
    for _ in range(steps):
        group.barrier()
        profiler.runcall(training.step)
    seconds: dict[str, float] = defaultdict(float)
    for function, (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        for owner, took in _shares(function, own, callers):
            seconds[owner] += took
    return {owner: 1e3 * took / steps for owner, took in seconds.items()}


def _shares(
    function: tuple[str, int, str], own: float, callers: Mapping[tuple[str, int, str], Sequence[Any]]
) -> list[tuple[str, float]]:
    path, _, name = function
    if path != "~":
        return [(_owner(path), own)]
    if "run_backward" in name:
        return [(ENGINE, own)]
    if "wait" in name or "barrier" in name:
        return [(WAITING, own)]
    return [(_owner(caller[0]), took[2]) for caller, took in callers.items()]


def _owner(path: str) -> str:
    return next((owner for part, owner in _OWNERS.items() if part in path), OTHERS)
