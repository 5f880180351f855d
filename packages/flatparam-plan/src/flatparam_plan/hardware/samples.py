"""Samples of programs, with few of their blocks, whose steps real ranks on this machine run and time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, final

import attrs
import torch

from flatparam_comm import Collectives, SingleCollectives, Topology, resolve_topology
from flatparam_plan.hardware.profile import Profile, Way
from flatparam_plan.hardware.stretches import Clock, ClockedCollectives, Lap, Stretches, Timings
from flatparam_plan.plan_error import PlanError
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.repeated.repeats import with_few_blocks
from flatparam_plan.training import Setup, Trained, TrainingProgram, train, train_step

_SECONDS: Final = 8.0
"""How long steps are timed, together."""
_WARM: Final = 3
"""The first steps of a program are slower than the others."""
_FEWEST, _MOST = 5, 300
"""Of the steps that are timed."""


def timed_here(ways: Sequence[tuple[TrainingProgram, Setup]]) -> list[Timings]:
    """Return the times of steps of samples of these programs on this machine, when all ranks of a world run them.

    The ranks are processes of one thread each, forked from this one. They run a step of each program in turn, so that
    all meet the same noise, for about eight seconds after some steps to warm up.

    Args:
        ways: programs and their setups, made by `setup_here`, with one world size and one transport.

    Raises:
        PlanError: if the ranks do not fit into this machine's memory, or if one of them fails.
    """
    first = ways[0][1]
    found: list[Timings] = _on_forked_ranks(first.world_size, functools.partial(_timed, ways))[first.rank]
    return found


def _timed(ways: Sequence[tuple[TrainingProgram, Setup]], rank: int, store: str) -> list[Timings]:
    """Run the steps on one rank, and return their times."""
    first = ways[0][1]
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=first.world_size)
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
    """Return a step of each; returns how long they took."""
    start = time.perf_counter()
    for sample in samples:
        group.barrier()
        sample.step(is_timed=is_timed)
    return time.perf_counter() - start


# A program with few of its blocks, whose steps a real rank runs and times


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
        """Return the times of the steps so far."""
        return self._stretches.timed(self._steps)


# Ranks that are processes, forked from this one


_PATIENCE: Final = 600


def _on_forked_ranks(world_size: int, work: Callable[[int, str], Any]) -> list[Any]:
    """Run `work` on `world_size` ranks, which are processes of one thread each, and return the results by rank.

    Args:
        work: is called with the rank, and with the path of a file by which the ranks can find each other.

    Raises:
        PlanError: if one of them fails, or if they take longer than ten minutes.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Who has threads is warned of forking; the ranks use none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_be_a_rank, args=(rank, os.path.join(folder, "store"), work, sending), daemon=True)
            for rank, (_, sending) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _heard([receiving for receiving, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _heard(pipes: list[Connection]) -> list[Any]:
    """Return the result of every rank; the first failure is raised."""
    said: dict[int, Any] = {}
    end = time.monotonic() + _PATIENCE
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise PlanError(
                f"this-machine: expected ranks to run their steps within {_PATIENCE} s, found that they did not; plan "
                "a smaller program, or choose a different profile"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection), "nothing else is waited for"
            rank = open_pipes.pop(pipe)
            try:
                said[rank], error = pipe.recv()
            except EOFError:
                error = "it ended without a word: was it out of memory?"
            if error:
                raise PlanError(
                    f"this-machine: expected {len(pipes)} ranks to run steps of the program, found that rank {rank} "
                    f"failed: {error}"
                )
    return [said[rank] for rank in range(len(pipes))]


def _be_a_rank(rank: int, store: str, work: Callable[[int, str], Any], sending: Connection) -> None:
    """Do the work, and send what it returns, or what went wrong."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        # What a program prints is no part of a plan.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sending.send((work(rank, store), ""))
    except BaseException as error:
        told = str(error) if isinstance(error, PlanError) else "".join(traceback.format_exception_only(error))
        sending.send((None, told.strip()))
