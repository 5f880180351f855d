"""Plans with the times of steps that real ranks run on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import attrs
import torch

from flatparam_comm import sent_nbytes
from flatparam_plan.hardware.profile import Profile, Way
from flatparam_plan.hardware.samples import ROUGH, timed_here
from flatparam_plan.hardware.stretches import Timings
from flatparam_plan.plan_error import PlanError
from flatparam_plan.rehearsal import Rehearsal
from flatparam_plan.timeline import Prediction, predict
from flatparam_plan.training import Setup, TrainingProgram

_MOST_RANKS: Final = 16


def setup_here(setup: Setup, transport: str) -> Setup:
    """Return the setup, over a transport of this machine.

    Raises:
        PlanError: if this machine cannot run it: for an accelerator, for more ranks than 16, or beside a process group.
    """
    if setup.device != "cpu":
        raise PlanError(
            f"this-machine: expected the schedule of a cpu, because the steps are measured on one, found "
            f"device={setup.device!r}; choose the profile of an accelerator"
        )
    if setup.world_size > _MOST_RANKS:
        raise PlanError(
            f"this-machine: expected a world of at most {_MOST_RANKS} ranks, which are all started here, found "
            f"{setup.world_size}; choose a smaller world, or a different profile"
        )
    if torch.distributed.is_initialized():
        raise PlanError(
            "this-machine: expected no process group, since ranks are started to measure their steps, found one; plan "
            "before init_process_group, or choose a different profile"
        )
    return attrs.evolve(setup, transport=transport)


def predicted_here(program: TrainingProgram, rehearsed: Sequence[Rehearsal]) -> list[Prediction]:
    """Return the time of a step for each rehearsal of `program`, from steps that ranks on this machine run.

    The samples of setups with one world size are run in turn.

    Args:
        rehearsed: under setups made by `setup_here`.

    Raises:
        PlanError: as `timed_here`.
    """
    made: dict[int, Prediction] = {}
    for world_size in dict.fromkeys(each.setup.world_size for each in rehearsed):
        some = [each for each in rehearsed if each.setup.world_size == world_size]
        for each, timings in zip(some, timed_here([(program, one.setup) for one in some]), strict=True):
            made[id(each)] = predict(each, _named(each.setup.transport), timings)
    return [made[id(each)] for each in rehearsed]


def profile_here(timings: Timings, setup: Setup) -> Profile:
    """Return a profile whose numbers give what was measured: kernels as slow as these, and collectives as fast."""
    took, expected = (sum(each[number] for each in timings.spans.values()) for number in (0, 1))
    slower = took / expected if took and expected else 1.0
    seconds: dict[tuple[str, int], float] = {}
    for key, each in timings.calls.items():
        call = None if key is None else key[2]
        if call is not None:
            seconds[call[:2]] = max(each, seconds.get(call[:2], 0.0))
    way = _way(seconds, setup)
    return attrs.evolve(
        _named(setup.transport),
        flops={name: rate / slower for name, rate in ROUGH.flops.items()},
        memory_bandwidth=ROUGH.memory_bandwidth / slower,
        launch=ROUGH.launch * slower,
        link=way,
        network=way,
    )


def _named(transport: str) -> Profile:
    """Return the profile of a prediction from measured steps: its name says where they were run."""
    source = "steps of three blocks of those that repeat, run just now"
    return attrs.evolve(ROUGH, name=f"this machine, {transport}", source=source)


def _way(seconds: dict[tuple[str, int], float], setup: Setup) -> Way:
    """Return the line through the times of collectives, by the bytes that a rank sends."""
    size = setup.world_size
    points = [
        (sent_nbytes(op, nbytes, rank=setup.rank % size, size=size), took) for (op, nbytes), took in seconds.items()
    ]
    points = [(sent, took) for sent, took in points if sent and took > 0]
    if not points:
        return ROUGH.link
    if len({sent for sent, _ in points}) > 1:
        slope, latency = statistics.linear_regression(*zip(*points, strict=True))
        if slope > 0 and latency >= 0:
            return Way(1 / slope, latency)
    return Way(sum(sent for sent, _ in points) / sum(took for _, took in points), 0.0)
