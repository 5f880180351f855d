"""One rank runs at a time: the order of events in a world of threads is the same in every run.

The rank that holds the baton runs until it must wait for something that has not happened, pauses, or ends; then the
next rank in cyclic order that can run gets it. Only the holder reads or writes anything here (the one exception is
`fail`, which the main thread may call), so no lock is needed, nothing is polled, and a deadlock is detected the moment
it exists: no rank can run, and some rank has not ended.

State of a rank, and who changes it:

| state | can it be given the baton? | left by |
| --- | --- | --- |
| READY | yes | getting the baton |
| RUNNING | has it | `block`, `pause`, `poll`, `finish` |
| BLOCKED | once `ready()` holds, or when the world has failed | getting the baton |
| PAUSED | when nobody else can run and its time is the next, or when the world has failed | getting the baton |
| FINISHED | no | - |
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import final

import attrs

from flatparam_comm.errors import CollectiveError, describe_call
from flatparam_comm.threads.current import GeneratorStates

#: Makes the error that a rank is to raise, from (the rank in the world, op, label).
ErrorFactory = Callable[[int, str, str], CollectiveError]


@attrs.frozen
class Waiting:
    """A rank's wait: the collective, the caller's label, and (asked only for an error) who is missing."""

    op: str
    label: str
    missing: Callable[[], str]

    def describe(self) -> str:
        """Return the text for an error."""
        return f"waits for {describe_call(self.op, self.label)} ({self.missing()})"


class _State(enum.Enum):
    READY = "ready"
    RUNNING = "running"
    BLOCKED = "blocked"
    PAUSED = "paused"
    FINISHED = "finished"


@attrs.define(eq=False)
class _Turn:
    """One rank's place in the order."""

    rank: int
    generators: GeneratorStates
    wake: threading.Event = attrs.field(factory=threading.Event)
    state: _State = _State.READY
    thread: int | None = None
    waiting: Waiting | None = None
    ready: Callable[[], bool] | None = None
    wakes_at: float = 0.0


@final
class Baton:
    """Make one for a world; each rank calls `begin` first and `finish` last, and `block` / `pause` / `poll` between.

    If no rank can go on, `on_stuck` makes the error from what each rank is doing, in words.
    """

    __slots__ = ("_clock", "_failure", "_on_stuck", "_turns", "finished")

    def __init__(self, size: int, on_stuck: Callable[[Sequence[tuple[int, str]]], ErrorFactory]) -> None:
        """Make a baton for ranks that have not begun; `start` hands it out."""
        states = GeneratorStates.capture()
        self._turns = [_Turn(rank, states) for rank in range(size)]
        self._on_stuck = on_stuck
        self._failure: ErrorFactory | None = None
        # Seconds of pauses that have passed. They take no time: when nobody else can run, the clock is moved.
        self._clock = 0.0
        #: Set when every rank has finished.
        self.finished = threading.Event()

    @property
    def failed(self) -> bool:
        """Whether the world has failed: a collective that is not complete by now never will be."""
        return self._failure is not None

    def start(self) -> None:
        """Give the baton to rank 0. The main thread calls it once, when the threads run."""
        self._turns[0].wake.set()

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        turn = self._turns[rank]
        turn.thread = threading.get_ident()
        self._receive(turn)

    def block(self, rank: int, ready: Callable[[], bool], waiting: Waiting) -> None:
        """Return when `ready()` holds; meanwhile others run. Raises the world's error if it never will."""
        if ready():
            return
        turn = self._turns[rank]
        if self._failure is None:
            turn.ready, turn.waiting = ready, waiting
            self._hand_over(turn, _State.BLOCKED)
            turn.ready = turn.waiting = None
        if not ready():
            raise self.error(rank, waiting.op, waiting.label)

    def pause(self, rank: int, seconds: float) -> None:
        """Let the others run until all of them wait, or pause for longer than this."""
        turn = self._turns[rank]
        turn.wakes_at = self._clock + seconds
        self._hand_over(turn, _State.PAUSED)
        self._clock = max(self._clock, turn.wakes_at)

    def poll(self, rank: int) -> None:
        """Let the others run once, so that a rank that asks again and again does not keep them from answering."""
        if self._failure is None:
            self._hand_over(self._turns[rank], _State.READY)

    def finish(self, rank: int) -> None:
        """Give the baton away for good."""
        self._hand_over(self._turns[rank], _State.FINISHED)

    def fail(self, failure: ErrorFactory) -> None:
        """From now on, a wait for an incomplete collective raises this error. The first failure stays."""
        if self._failure is None:
            self._failure = failure

    def error(self, rank: int, op: str, label: str) -> CollectiveError:
        """Return the error of this rank, in a world that has failed."""
        assert self._failure is not None
        return self._failure(rank, op, label)

    def belongs_here(self, rank: int) -> bool:
        """Return whether the caller is the thread of `rank`."""
        return threading.get_ident() == self._turns[rank].thread

    def check_thread(self, rank: int, op: str, label: str) -> None:
        """Raise CollectiveError unless the caller is the thread of `rank`: only that one can hold its baton."""
        if not self.belongs_here(rank):
            raise CollectiveError(
                rank,
                op,
                label,
                f"expected a call from the rank's own thread, found thread {threading.current_thread().name!r}; in a "
                "world of threads one rank runs at a time, so do not call collectives from helper threads",
            )

    def doing(self, rank: int) -> str:
        """Return a text that says what a rank is doing."""
        turn = self._turns[rank]
        if turn.waiting is not None:
            return turn.waiting.describe()
        return "has finished" if turn.state is _State.FINISHED else f"is {turn.state.value}"

    def _hand_over(self, turn: _Turn, state: _State) -> None:
        turn.generators = GeneratorStates.capture()
        turn.state = state
        chosen = self._choose(after=turn.rank)
        if chosen is turn:
            turn.state = _State.RUNNING
            return
        if chosen is None:
            self.finished.set()
            return
        chosen.wake.set()
        if state is not _State.FINISHED:
            self._receive(turn)

    def _receive(self, turn: _Turn) -> None:
        turn.wake.wait()
        turn.wake.clear()
        turn.state = _State.RUNNING
        turn.generators.install()

    def _choose(self, *, after: int) -> _Turn | None:
        """Return the rank that runs next; None if all have finished. A world in which no rank can run fails here."""
        order = self._turns[after + 1 :] + self._turns[: after + 1]
        runnable = next((turn for turn in order if self._can_run(turn)), None)
        if runnable is not None:
            return runnable
        paused = [turn for turn in order if turn.state is _State.PAUSED]
        if paused:
            return min(paused, key=lambda turn: turn.wakes_at)
        blocked = next((turn for turn in order if turn.state is _State.BLOCKED), None)
        if blocked is not None:
            self.fail(self._on_stuck([(turn.rank, self.doing(turn.rank)) for turn in self._turns]))
        return blocked

    def _can_run(self, turn: _Turn) -> bool:
        if turn.state is _State.BLOCKED:
            return self.failed or (turn.ready is not None and turn.ready())
        return turn.state is _State.READY or (turn.state is _State.PAUSED and self.failed)
