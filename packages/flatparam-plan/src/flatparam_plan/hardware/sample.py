"""A program with few of its blocks, whose steps a real rank runs and times."""

from __future__ import annotations

from typing import Final, final

import attrs

from flatparam_comm import Collectives, Topology
from flatparam_plan.hardware.clock import Clock, ClockedCollectives, Lap
from flatparam_plan.hardware.profile import Profile, Way
from flatparam_plan.hardware.stretches import Stretches, Timings
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.repeated import with_few_blocks
from flatparam_plan.training import Setup, Trained, TrainingProgram, train, train_step

__all__ = ["ROUGH", "Sample"]

_STD: Final = 0.02
_WAY: Final = Way(1e9, 1e-4)
ROUGH: Final = Profile(
    name="this run",
    source="steps of a program with three blocks of those that repeat",
    device="cpu",
    flops={"float32": 5e10, "bfloat16": 1e10},
    memory=1e10,
    memory_bandwidth=1e10,
    launch=1e-5,
    link=_WAY,
    network=_WAY,
    host=1e10,
)
"""Of about any processor's core: which kernels take longer than others. How long they take is measured."""


@final
@attrs.define(eq=False)
class Sample:
    """A training program with three blocks of those that repeat, on one of its real ranks.

    Its steps tell how long a unit of each kind computes, forward and backward, how long the host takes beside that,
    and how long collectives of the sizes that occur take while every rank is busy. What a program of more blocks takes
    is laid out from these times: see `Stretches.laid`.
    """

    program: TrainingProgram
    setup: Setup
    _stretches: Stretches
    _trained: Trained
    _clock: Clock
    _steps: list[list[Lap]] = attrs.field(factory=list)
    _count: int = 0

    @classmethod
    def of(cls, program: TrainingProgram, setup: Setup, topology: Topology) -> Sample:
        """Build and wrap it on the ranks of `topology`."""
        few, its_setup = with_few_blocks(program, setup)
        stretches = Stretches.of(rehearse(few, its_setup), ROUGH)
        clock = Clock()

        def clocked(group: Collectives) -> Collectives:
            return group if group.size == 1 else ClockedCollectives(group, clock)

        replicate = topology.replicate
        groups = Topology(clocked(topology.shard), None if replicate is None else clocked(replicate))
        trained = train(few, its_setup, groups, clock, steps=0)
        for parameter in trained.model.parameters():
            # A model that was on the meta device has whatever was in memory, with which some kernels are slow.
            parameter.data.normal_(std=_STD)
        return cls(few, its_setup, stretches, trained, clock)

    def step(self, *, is_timed: bool = True) -> None:
        """Run one step; the first steps of a program are slower than the others, and are not to be timed."""
        self._clock.laps.clear()
        train_step(self.program, self.setup, self._trained, self._clock, self._count)
        self._count += 1
        with self._clock.stage("end", self._count):
            pass
        if is_timed:
            self._steps.append(list(self._clock.laps))

    def timings(self) -> Timings:
        """The times of the steps so far."""
        return self._stretches.timed(self._steps)
