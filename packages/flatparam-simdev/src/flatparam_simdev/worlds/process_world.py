"""A world of processes for tests: N ranks over gloo on this machine, each a process forked from a clean server.

multiprocessing's "forkserver" forks them from a process that has imported torch and done nothing with it. A plain fork
of the caller would be faster still, but children of a process that has run a backward pass cannot run one: autograd's
threads do not survive a fork.

`run_on_device` gives each of them a simulated device.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from flatparam_comm import RankDied, RankError, WorldTimeout
from flatparam_simdev import build
from flatparam_simdev.worlds.child import STACKS_SIGNAL, ChildPlan, FunctionReference, Report, run_child

T = TypeVar("T")

#: Seconds for the other ranks to report, once one has failed. Ranks that are told report within two on a quiet machine.
_GRACE_SECONDS = 5.0

#: The modules that the server imports, so that no rank has to: this package, torch, and what test modules often need.
_PRELOADED = ("torch", "torch.distributed", "flatparam_simdev.worlds.child")
_PRELOADED_IF_USED = ("pytest",)

#: Seconds for a rank to write down its stacks.
_STACKS_SECONDS = 0.2


@attrs.define(eq=False)
class _Child:
    """One rank's process, as seen by its parent."""

    plan: ChildPlan
    process: BaseProcess
    connection: Connection
    report: Report | None = None
    ended: bool = False

    @property
    def failed(self) -> bool:
        """Whether the child ended without a result, or reported an error."""
        return (self.ended and self.report is None) or (self.report is not None and self.report.result is None)

    def stacks(self) -> str:
        """Return the stacks that the child wrote at the last signal; it may be too early for any."""
        try:
            return self.plan.stacks.read_text()
        except FileNotFoundError:
            return "  (starting)"

    def receive(self) -> None:
        """Receive the child's report; if the pipe ends without one, the child has died."""
        try:
            self.report = self.connection.recv()
        except (EOFError, OSError):
            self.ended = True


def run_processes(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 60,
    pg_timeout: float = 10,
    grace: float = _GRACE_SECONDS,
) -> list[T]:
    """Run `fn(collectives, *args)` in each of `world_size` processes; returns the results in rank order.

    `fn` is a function at the top level of a module (a test module, too, whatever pytest calls it); `args` and results
    are pickled. `collectives` is a `ProcessGroupCollectives` on torch's default group over gloo, with collectives that
    fail after `pg_timeout` seconds. If a rank fails, the others have `grace` seconds to report, and are killed then.
    Each process has one torch thread. The first call starts the server (which takes as
    long as importing torch); later calls take some tenths of a second.

    Raises RankError with the remote traceback of the lowest rank that failed by itself, RankDied (a RankError) if a
    process died without a report, WorldTimeout, with each unfinished rank's stack, after `timeout` seconds. No process
    outlives the call. The operating system must support fork.
    """
    if world_size < 1:
        raise ValueError(f"run_processes: expected a world of one or more ranks, found world_size={world_size}")
    function = FunctionReference.of(fn)
    payload = pickle.dumps(args)
    with tempfile.TemporaryDirectory(prefix="flatparam-world-") as directory:
        plans = [ChildPlan(rank, world_size, function, payload, directory, pg_timeout) for rank in range(world_size)]
        children: list[_Child] = []
        try:
            for plan in plans:
                children.append(_start(plan))
            _collect(children, timeout, grace)
            for child in children:
                # The children leave the group together.
                child.process.join(_GRACE_SECONDS)
        finally:
            for child in children:
                _end(child)
    return [pickle.loads(child.report.result) for child in children if child.report and child.report.result]


def _start(plan: ChildPlan) -> _Child:
    context = multiprocessing.get_context("forkserver")
    # Only the first call in a process has an effect: the server runs from then on.
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _PRELOADED_IF_USED if name in sys.modules)])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_child, args=(plan, theirs), name=f"rank-{plan.rank}")
    process.start()
    # The pipe must end when the child does.
    theirs.close()
    return _Child(plan, process, ours)


def _collect(children: Sequence[_Child], timeout: float, grace: float) -> None:
    """Return when every child has reported a result; raise otherwise."""
    deadline = time.monotonic() + timeout
    failing = False
    while waiting := [child for child in children if child.report is None and not child.ended]:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([child.connection for child in waiting], max(0.0, left))
        if not ready:
            break
        for child in waiting:
            if child.connection in ready:
                child.receive()
        if not failing and any(child.failed for child in children):
            failing = True
            deadline = min(deadline, time.monotonic() + grace)
    if failing:
        raise _error_of(children)
    if any(child.report is None for child in children):
        raise WorldTimeout(f"run_processes: not done after {timeout} s: {_still_running(children)}")


def _error_of(children: Sequence[_Child]) -> RankError:
    """Return the error of the rank that is to blame: one that died, else one that failed by itself, else any."""
    size = len(children)
    failed = [child for child in children if child.failed]
    for child in failed:
        if child.report is None:
            return _death(child, size)
    reports = [(child.plan.rank, child.report) for child in failed if child.report is not None]
    rank, report = next(((rank, report) for rank, report in reports if not report.is_consequence), reports[0])
    others = "".join(f"\n(rank {other}: {told.error})" for other, told in reports if other != rank)
    message = f"rank {rank} of {size} failed with {report.error}{others}"
    if report.is_consequence:
        # No rank failed by itself, so a rank that has not reported is to blame.
        message += _still_running(children)
    return RankError(rank, message, report.traceback)


def _still_running(children: Sequence[_Child]) -> str:
    """Return a text with the stacks of each rank that has neither reported nor died."""
    running = [child for child in children if child.report is None and not child.ended]
    for child in running:
        pid = child.process.pid
        # The child may end at this very moment.
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, STACKS_SIGNAL)
    time.sleep(_STACKS_SECONDS if running else 0)
    return "".join(f"\nrank {child.plan.rank} is still running:\n{child.stacks()}" for child in running)


def _death(child: _Child, size: int) -> RankDied:
    rank = child.plan.rank
    child.process.join(_GRACE_SECONDS)
    exitcode = child.process.exitcode
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        message = f"rank {rank} of {size} was killed by {name} before it had a result\n{child.stacks()}".rstrip()
        return RankDied(rank, message, exitcode, name)
    message = f"rank {rank} of {size} ended with exit code {exitcode} before it had a result"
    return RankDied(rank, message, -1 if exitcode is None else exitcode, "")


def _end(child: _Child) -> None:
    """Kill a child if it is still alive, and return when it is gone."""
    if child.process.is_alive():
        child.process.kill()
    child.process.join()
    child.process.close()
    child.connection.close()


@attrs.frozen(eq=False)
class World:
    """The facts that a rank is told.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
        device: the simulated device of this process.
        group: all ranks, over the simulated backend.
        cpu_group: all ranks, over gloo; torch's default group.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup


def run_on_device(world_size: int, function: Callable[..., T], *args: Any, timeout: float = 600) -> list[T]:
    """Run `function(world, *args)` in each of `world_size` processes with a device; returns the results in rank order.

    Function, arguments, results and errors are as for `run_processes`. A collective fails after half of `timeout`, in
    seconds.

    Raises:
        CannotBuild: where there is no compiler, or where it fails.
    """
    build.built()
    reference, payload = FunctionReference.of(function), pickle.dumps(args)
    return run_processes(world_size, _as_rank, reference, payload, timeout, timeout=timeout, pg_timeout=timeout / 2)


def _as_rank(collectives: Any, reference: FunctionReference, payload: bytes, timeout: float) -> Any:
    # The function's module first, as the arguments may be of its classes.
    function, args = reference.resolve(), pickle.loads(payload)
    from flatparam_simdev import device  # registers it, in this process only

    group = dist.new_group(backend=device.DEVICE.type, timeout=timedelta(seconds=timeout / 2))
    world = World(collectives.rank, collectives.size, device.DEVICE, group, collectives.group)
    return function(world, *args)
