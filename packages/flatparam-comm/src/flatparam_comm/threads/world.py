"""A world of threads: N ranks in one process, in the same order in every run, on CPU or all on one GPU.

It is for tests, notebooks and debugging: a breakpoint stops the world, an exception is raised with its traceback, a
hang is an error that says which rank waits for what, and two runs never differ.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import attrs
import torch

from flatparam_comm.collectives import Collectives
from flatparam_comm.decorators.faults import Fault, FaultyCollectives, Kill
from flatparam_comm.errors import (
    CollectiveError,
    MismatchError,
    PeerError,
    RankError,
    WorldTimeout,
    cause_among,
    told_by_ranks,
)
from flatparam_comm.threads.current import GeneratorStates, accelerator_in_use, set_current_collectives
from flatparam_comm.threads.engine import ThreadWorld

T = TypeVar("T")

#: Seconds for a stopped world to unwind. A rank in a long computation cannot be interrupted, and the others cannot run
#: meanwhile; then the threads are abandoned (they are daemons).
_UNWIND_SECONDS = 1.0

#: The longest time until Ctrl-C is detected, in seconds.
_SLICE_SECONDS = 0.5


@attrs.define(eq=False)
class _Outcome:
    """The outcome of one rank: `error` is set if it raised; otherwise `value` is its result."""

    value: Any = None
    error: BaseException | None = None


def run_threads(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float | None = 60,
    faults: Sequence[Fault] = (),
    deliver_late: bool = True,
) -> list[T]:
    """Run `fn(collectives, *args)` on each of `world_size` ranks; returns the results in rank order.

    The ranks are threads of this process, of which one runs at a time: a rank runs until it waits for something that is
    not complete, then the next rank (cyclically) that can run does. So the order of events, and of additions, is the
    same in each run. Each rank has random generators and a `current_collectives()` of its own, and runs backward in its
    own thread. `args` are shared by the ranks, not copied.

    `timeout` is in seconds, None for no limit. `faults` are injected at the collectives that they match; their delays
    take no time (the other ranks go first). `deliver_late=False` writes results as early as possible instead of in
    `wait()`.

    Raises RankError with the exception of the lowest rank that failed by itself as its cause; on the other ranks, waits
    that can no longer complete raise `PeerError`. `DeadlockError` and `MismatchError` are raised on every rank. Raises
    WorldTimeout after `timeout` seconds; a rank that is computing then runs on until its next collective.
    """
    _check(world_size, faults)
    world = ThreadWorld(world_size, deliver_late=deliver_late)
    outcomes = [_Outcome() for _ in range(world_size)]
    device = None if accelerator_in_use() is None else torch.accelerator.current_device_index()
    threads = [
        threading.Thread(
            target=_run_rank,
            args=(world, rank, outcomes[rank], fn, args, faults, device),
            name=f"rank-{rank}",
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    states = GeneratorStates.capture()
    try:
        _oversee(world, threads, timeout)
    finally:
        states.install()
    _raise_failure(world, outcomes)
    return [cast(T, outcome.value) for outcome in outcomes]


def _check(world_size: int, faults: Sequence[Fault]) -> None:
    if world_size < 1:
        raise ValueError(f"run_threads: expected a world of one or more ranks, found world_size={world_size}")
    for fault in faults:
        if isinstance(fault.action, Kill):
            raise ValueError(
                f"run_threads: expected faults that a thread survives or raises, found {fault}; "
                "a signal would end every rank and the caller: use flatparam_comm.testing.run_processes"
            )


def _run_rank(
    world: ThreadWorld,
    rank: int,
    outcome: _Outcome,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    faults: Sequence[Fault],
    device: int | None,
) -> None:
    """One rank's thread, from its first turn to its last."""
    baton = world.baton
    baton.begin(rank)
    # OpenMP has one setting per thread: take over the caller's.
    torch.set_num_threads(torch.get_num_threads())
    try:
        engine = world.collectives(rank)
        collectives: Collectives = FaultyCollectives(engine, faults, sleep=engine.sleep) if faults else engine
        if device is not None:
            # A new thread begins on device 0.
            torch.accelerator.set_device_index(device)
        # With all ranks on one GPU, backward must not run on the one thread that autograd has per device: a rank that
        # waits there would keep the others from ever getting to the same point.
        with set_current_collectives(collectives), torch.autograd.set_multithreading_enabled(False):
            outcome.value = fn(collectives, *args)
    except BaseException as error:
        outcome.error = error
        cause = error
        baton.fail(lambda waiting, op, label: PeerError(rank, cause, waiting_rank=waiting, op=op, label=label))
    finally:
        baton.finish(rank)


def _oversee(world: ThreadWorld, threads: Sequence[threading.Thread], timeout: float | None) -> None:
    """Start the ranks and return when all have finished; stop them on a timeout or an interrupt."""
    try:
        world.baton.start()
        if _wait_interruptibly(world.baton.finished, timeout):
            for thread in threads:
                thread.join()
            return
    except BaseException as error:
        # This is mostly KeyboardInterrupt, which is raised in the main thread only.
        _stop(world, threads, f"the world was stopped by {type(error).__name__}")
        raise
    where = [(rank, _whereabouts(world, rank, thread)) for rank, thread in enumerate(threads)]
    _stop(world, threads, f"the world was stopped after {timeout} s")
    raise WorldTimeout(told_by_ranks(f"run_threads: not done after {timeout} s", where))


def _wait_interruptibly(event: threading.Event, timeout: float | None) -> bool:
    """Wait in slices: a signal that comes just before a thread begins to wait does not end that wait."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if event.wait(min(left, _SLICE_SECONDS)):
            return True
    return event.is_set()


def _stop(world: ThreadWorld, threads: Sequence[threading.Thread], reason: str) -> None:
    """Make every rank's next wait or call raise, and give them a moment to unwind."""
    world.baton.fail(lambda rank, op, label: CollectiveError(rank, op, label, reason))
    deadline = time.monotonic() + _UNWIND_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _whereabouts(world: ThreadWorld, rank: int, thread: threading.Thread) -> str:
    doing = world.baton.doing(rank)
    frame = sys._current_frames().get(thread.ident or 0)
    if doing != "is running" or frame is None:
        return doing
    last = traceback.extract_stack(frame)[-1]
    return f"is running {last.filename}:{last.lineno} in {last.name}"


def _raise_failure(world: ThreadWorld, outcomes: Sequence[_Outcome]) -> None:
    """Raise the failure of the lowest rank that failed by itself, if any did."""
    failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    left_open = world.left_open()
    if not failed and left_open:
        failed = [(0, MismatchError(0, "run_threads", "", left_open))]
    if not failed:
        return
    rank, error = next(((rank, error) for rank, error in failed if not _is_consequence(error)), failed[0])
    message = f"rank {rank} of {len(outcomes)} failed with {type(error).__name__}: {error}"
    raise RankError(rank, message) from error


def _is_consequence(error: BaseException) -> bool:
    """Return whether another rank's error caused this one: it is a PeerError, or was raised while one was handled."""
    return cause_among(error, PeerError) is not None
