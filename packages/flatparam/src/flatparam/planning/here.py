"""The times of steps on this machine: real ranks, started for some seconds, run samples of programs in turn."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from flatparam.planning.errors import PlanError
from flatparam.planning.hardware.named import profile_named
from flatparam.planning.hardware.profile import Profile, Way
from flatparam.planning.hardware.sample import ROUGH, Sample
from flatparam.planning.hardware.stretches import Timings
from flatparam.planning.program import TrainingProgram
from flatparam.planning.rehearsal.rehearsal import Rehearsal
from flatparam.planning.setup import Setup
from flatparam.planning.timeline import Prediction, predict
from flatparam_comm import SingleCollectives, resolve_topology, sent_nbytes

__all__ = ["device_of", "predicted_here", "profile_here", "setup_here", "timed_here", "transport_here"]

_SECONDS: Final = 8.0
"""How long steps are timed, together."""
_WARM: Final = 3
"""The first steps of a program are slower than the others."""
_FEWEST, _MOST = 5, 300
"""Of the steps that are timed."""
_MOST_RANKS: Final = 16
_PATIENCE: Final = 600


def transport_here(profile: object) -> str | None:
    """The transport that the name of a profile asks to measure here, if it does.

    That is "shared_memory" of "this-machine", and "gloo" of "this-machine:gloo".
    """
    name, _, transport = profile.partition(":") if isinstance(profile, str) else ("", "", "")
    known = transport in ("", "gloo", "shared_memory")
    return (transport or "shared_memory") if name == "this-machine" and known else None


def device_of(profile: str | Path | Profile) -> str:
    """Whose schedule the runtime has under a profile: "cpu" or "accelerator"."""
    return "cpu" if transport_here(profile) else profile_named(profile).device


def setup_here(setup: Setup, transport: str) -> Setup:
    """The setup, over a transport of this machine.

    Raises:
        PlanError: if this machine cannot run it: for an accelerator, for more ranks than 16, or beside a process group.
    """
    if setup.device != "cpu":
        raise PlanError(
            f"this-machine: expected the schedule of a cpu, which is what is measured, found device="
            f"{setup.device!r}; choose the profile of an accelerator"
        )
    if setup.world_size > _MOST_RANKS:
        raise PlanError(
            f"this-machine: expected a world of at most {_MOST_RANKS} ranks, which are all started here, found "
            f"{setup.world_size}; choose a smaller world, or another profile"
        )
    if torch.distributed.is_initialized():
        raise PlanError(
            "this-machine: expected no process group, since ranks are started to measure their steps, found one; plan "
            "before init_process_group, or choose another profile"
        )
    return attrs.evolve(setup, transport=transport)


def predicted_here(program: TrainingProgram, rehearsed: Sequence[Rehearsal]) -> list[Prediction]:
    """The time of a step for each rehearsal of `program`, from steps that ranks on this machine run.

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


def timed_here(ways: Sequence[tuple[TrainingProgram, Setup]]) -> list[Timings]:
    """What steps of samples of these programs take on this machine, when all ranks of a world run them.

    The ranks are processes of one thread each, forked from this one. They run a step of each program in turn, so that
    all meet the same noise, for about eight seconds after some steps to warm up.

    Args:
        ways: programs and their setups, made by `setup_here`, with one world size and one transport.

    Raises:
        PlanError: if the ranks do not fit into this machine's memory, or if one of them fails.
    """
    context = multiprocessing.get_context("fork")
    world_size = ways[0][1].world_size
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Who has threads is warned of forking; the ranks use none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_be_a_rank, args=(rank, Path(folder) / "store", ways, sending), daemon=True
            )
            for rank, (_, sending) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sending in pipes:
            sending.close()
        try:
            said = _heard([receiving for receiving, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    found: list[Timings] = said[ways[0][1].rank]
    return found


def profile_here(timings: Timings, setup: Setup) -> Profile:
    """A profile whose numbers give what was measured: kernels as slow as these, and collectives as fast."""
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
    """The profile of a prediction from measured steps: its name says where they were run."""
    source = "steps of three blocks of those that repeat, run just now"
    return attrs.evolve(ROUGH, name=f"this machine, {transport}", source=source)


def _way(seconds: dict[tuple[str, int], float], setup: Setup) -> Way:
    """The line through the times of collectives, by the bytes that a rank sends."""
    size = setup.world_size
    points = [
        (sent_nbytes(op, nbytes, rank=setup.rank % size, size=size), took)
        for (op, nbytes), took in seconds.items()
    ]
    points = [(sent, took) for sent, took in points if sent and took > 0]
    if not points:
        return ROUGH.link
    if len({sent for sent, _ in points}) > 1:
        slope, latency = statistics.linear_regression(*zip(*points, strict=True))
        if slope > 0 and latency >= 0:
            return Way(1 / slope, latency)
    return Way(sum(sent for sent, _ in points) / sum(took for _, took in points), 0.0)


def _heard(pipes: list[Connection]) -> list[Any]:
    """What every rank says; the first that fails is the error."""
    said: dict[int, Any] = {}
    end = time.monotonic() + _PATIENCE
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise PlanError(
                f"this-machine: expected ranks to run their steps within {_PATIENCE} s, found that they did not; plan "
                "a smaller program, or choose another profile"
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


def _be_a_rank(
    rank: int, store: Path, ways: Sequence[tuple[TrainingProgram, Setup]], sending: Connection
) -> None:
    """Run the steps, and send their times, or what went wrong."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        # What a program prints is no part of a plan.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sending.send((_timed(rank, store, ways), ""))
    except BaseException as error:
        told = str(error) if isinstance(error, PlanError) else "".join(traceback.format_exception_only(error))
        sending.send((None, told.strip()))


def _timed(rank: int, store: Path, ways: Sequence[tuple[TrainingProgram, Setup]]) -> list[Timings]:
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
