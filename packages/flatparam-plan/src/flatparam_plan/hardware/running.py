"""Real ranks on this machine, started for some seconds to run samples of programs in turn."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch

from flatparam_comm import SingleCollectives, resolve_topology
from flatparam_plan.hardware.forked import on_forked_ranks
from flatparam_plan.hardware.sample import Sample
from flatparam_plan.hardware.stretches import Timings
from flatparam_plan.training import Setup, TrainingProgram

__all__ = ["timed_here"]

_SECONDS: Final = 8.0
"""How long steps are timed, together."""
_WARM: Final = 3
"""The first steps of a program are slower than the others."""
_FEWEST, _MOST = 5, 300
"""Of the steps that are timed."""


def timed_here(ways: Sequence[tuple[TrainingProgram, Setup]]) -> list[Timings]:
    """The times of steps of samples of these programs on this machine, when all ranks of a world run them.

    The ranks are processes of one thread each, forked from this one. They run a step of each program in turn, so that
    all meet the same noise, for about eight seconds after some steps to warm up.

    Args:
        ways: programs and their setups, made by `setup_here`, with one world size and one transport.

    Raises:
        PlanError: if the ranks do not fit into this machine's memory, or if one of them fails.
    """
    first = ways[0][1]
    found: list[Timings] = on_forked_ranks(first.world_size, functools.partial(_timed, ways))[first.rank]
    return found


def _timed(ways: Sequence[tuple[TrainingProgram, Setup]], rank: int, store: str) -> list[Timings]:
    """Run the steps on one rank, and return their times."""
    first = ways[0][1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=first.world_size
    )
    group: Any = SingleCollectives()
    if first.world_size > 1:
        group = resolve_topology("shared_memory" if first.transport == "shared_memory" else None).shard
    samples = []
    for program, setup in ways:
        torch.manual_seed(0)
        samples.append(Sample.of(program, attrs.evolve(setup, rank=rank), setup.topology_on(group)))
    for _ in range(_WARM):
        took = _turn(samples, group, is_timed=False)
    # Every rank has to run as many steps as the others.
    count = int(group.exchange(min(max(_SECONDS / took, _FEWEST), _MOST))[0])
    for _ in range(count):
        _turn(samples, group, is_timed=True)
    group.barrier()
    return [sample.timings() for sample in samples]


def _turn(samples: Sequence[Sample], group: Any, *, is_timed: bool) -> float:
    """A step of each; returns how long they took."""
    start = time.perf_counter()
    for sample in samples:
        group.barrier()
        sample.step(is_timed=is_timed)
    return time.perf_counter() - start
