"""Real ranks on this machine, started for some seconds to run samples of programs in turn."""

from __future__ import annotations

import multiprocessing
import os
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
from flatparam.planning.hardware.sample import Sample
from flatparam.planning.hardware.stretches import Timings
from flatparam.planning.program import TrainingProgram
from flatparam.planning.setup import Setup
from flatparam_comm import SingleCollectives, resolve_topology

__all__ = ["timed_here"]

_SECONDS: Final = 8.0
"""How long steps are timed, together."""
_WARM: Final = 3
"""The first steps of a program are slower than the others."""
_FEWEST, _MOST = 5, 300
"""Of the steps that are timed."""
_PATIENCE: Final = 600


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
