"""The thread that tells the other ranks of this one's failure, and listens for theirs.

It looks at the store four times a second, at the processes on this host all the time, and never at the collectives: a
rank whose collectives succeed pays nothing. If a peer has failed that this rank waits for, or would wait for, the
thread makes the backend give up; the thread that waited then asks why, and raises `PeerError`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import attrs

from flatparam_comm.relay.board import Board, Presence
from flatparam_comm.relay.calls import GroupCalls
from flatparam_comm.relay.failure import FailureReport
from flatparam_comm.relay.host import Neighbours, host_identity, start_of

__all__ = ["Pace", "Relay"]


@final
@attrs.frozen
class Pace:
    """The seconds between what the relay does."""

    look: float = 0.25
    """Between two looks at the store."""
    settle: float = 0.1
    """From an exception until it is told: if the program catches it and goes on, nobody has to know."""
    mercy: float = 0.4
    """From the news of a failed rank whose process lives, or of a process that has ended, until nobody waits for it."""
    beat: float = 1.0
    """Between two beats, if there are several hosts."""
    silence: float = 20.0
    """Without a beat, until a rank on another host counts as lost."""
    flush: float = 2.0
    """The most that a process which ends waits for its failure to be told."""
    farewell: float = 0.6
    """The most that rank 0, which may hold the store, waits at the end of the group for the others to leave."""


#: Ranks whose presence is looked for at one tick.
_AT_ONCE: Final = 32
#: Looks without a new beat, at the least, until a rank counts as lost: this process may have been stopped itself.
_LEAST_LOOKS: Final = 8


@final
@attrs.define(eq=False)
class _Letter:
    """A failure that is to be told at the time `due`."""

    failure: FailureReport
    due: float
    sent: threading.Event = attrs.field(factory=threading.Event)


@final
@attrs.define(eq=False)
class _Pulse:
    """The last beat of a rank on another host."""

    beat: bytes
    since: float
    looks: int = 0


@final
class Relay:
    """The relay of this process; `run` is its thread. `calls` are those of the groups that take part, by name."""

    def __init__(self, rank: int, world_size: int, store: Any, pace: Pace) -> None:
        """Prepare rank `rank`; `store` is for the relay alone."""
        self.rank = rank
        self.calls: dict[str, GroupCalls] = {}
        self.pace = pace
        self.pid = os.getpid()
        self._board: Board | None = Board(store, rank)
        host = host_identity()
        self._presence = Presence(uuid.uuid4().hex, self.pid, start_of(self.pid), host)
        self._neighbours = Neighbours()
        self._unknown = [other for other in range(world_size) if other != rank]
        self._presences: dict[int, Presence] = {}
        self._known: dict[int, FailureReport] = {}
        self._since: dict[int, float] = {}
        self._pulses: dict[int, _Pulse] = {}
        self._letters: list[_Letter] = []
        self._told: BaseException | FailureReport | None = None
        self._own: FailureReport | None = None
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._next_beat = self._next_look = 0.0
        self._ears, bell = os.pipe()
        os.set_blocking(bell, False)
        self._bell: int | None = bell
        self._thread = threading.Thread(target=self.run, name="flatparam relay", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread listens."""
        return self._thread.is_alive()

    # What the other threads call

    def tell(self, failure: FailureReport) -> None:
        """Let the other ranks know of a failure of this one: at once if another rank is the cause, or it is final."""
        own = self._own
        if (
            own is not None
            and own.culprit == failure.culprit != self.rank
            and own.is_final >= failure.is_final
        ):
            # Every call after the first on a broken group raises the same.
            return
        self._post(failure, 0.0 if failure.is_consequence or failure.is_final else self.pace.settle)

    def tell_error(self, error: BaseException | None, failure: FailureReport) -> None:
        """Let the other ranks know of an exception: of each one once, and once more if it ends the process."""
        if error is not None and error is self._told and not failure.is_final:
            return
        known = self._own
        if known is not None and known.is_final:
            return
        if error is not None and error is self._told and known is not None:
            # What the rank was doing was told when the exception was raised.
            failure = attrs.evolve(known, is_final=True)
        self._told = error
        for calls in [*self.calls.values()]:
            calls.note_own_failure()
        self.tell(failure)

    def retract(self) -> None:
        """Let the other ranks know that this one goes on after an exception, which the program has caught."""
        own = self._own
        if own is None or own.is_consequence or own.is_final:
            return
        self._own = self._told = None
        with self._changed:
            waiting = [letter for letter in self._letters if letter.failure.is_final]
            was_told = len(waiting) == len(self._letters)
            self._letters = waiting
        if was_told:
            self._post(attrs.evolve(own, is_retracted=True), 0.0)

    def tell_departure(self, message: str) -> None:
        """Let the other ranks know that this one ends, unless they know that it has failed."""
        if self._own is None or not self._own.is_final:
            self._post(FailureReport.departure(self.rank, message), 0.0)

    def give_up(self) -> None:
        """If this rank has failed, make the backend give up what is under way: the process could not end."""
        if self._own is not None and not self._own.is_departure:
            for calls in [*self.calls.values()]:
                calls.stop_waiting()

    def flush(self) -> None:
        """Return when everything is told, or after a moment."""
        deadline = time.monotonic() + self.pace.flush
        for letter in [*self._letters]:
            if self.is_running:
                letter.sent.wait(max(0.0, deadline - time.monotonic()))

    def explanation(self, calls: GroupCalls, patience: float) -> FailureReport | None:
        """The failure of a peer that explains why a collective of the group has failed; None if none is known.

        Args:
            patience: the seconds to wait for one.
        """
        deadline = time.monotonic() + patience
        self._ring()
        while True:
            found = self._best(calls, only_ended=False)
            late = time.monotonic() >= deadline or not self.is_running
            if late or (found is not None and not found.is_vague):
                # The thread may be held up by the store; what ends here is seen without it.
                return found or self._best(calls, only_ended=True)
            with self._changed:
                self._changed.wait(0.05)

    def end(self) -> None:
        """Take this rank's keys away, and stop listening; returns after a moment at most."""
        self._is_ending.set()
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(self.pace.flush)

    def forget(self) -> None:
        """Become deaf and dumb in a forked process: the thread and the connection are the parent's."""
        self.calls.clear()
        self._is_ending.set()
        # Another thread may have held it when the process was forked.
        self._changed = threading.Condition()
        self._neighbours.close()
        self._close_pipe()

    # The thread

    def run(self) -> None:
        """Tell and listen until the end."""
        try:
            self._with_board(lambda board: board.enter(self._presence))
            while not self._is_ending.is_set() and (self._board or len(self._neighbours)):
                self._tick()
                self._listen()
            self._with_board(self._leave)
        except Exception:
            # A healthy run must not suffer from its relay. Without one, failures do not travel; nothing else changes.
            pass
        finally:
            self._board = None
            self._neighbours.close()
            self._close_pipe()
            for letter in self._letters:
                letter.sent.set()

    def _close_pipe(self) -> None:
        with self._changed:
            bell, self._bell = self._bell, None
            if bell is not None:
                os.close(bell)
                os.close(self._ears)

    def _tick(self) -> None:
        now = time.monotonic()
        self._send(now)
        # In this order: the last words of a process that ended are read before its end counts.
        ended = self._neighbours.ended()
        self._with_board(lambda board: self._read_news(board, now))
        self._note_ended(ended, now)
        if now >= self._next_look:
            self._next_look = now + self.pace.look
            self._with_board(self._meet)
            self._with_board(lambda board: self._feel_pulses(board, now))
        self._break_groups(now)
        with self._changed:
            self._changed.notify_all()

    def _listen(self) -> None:
        """Sleep until it is time to look again, somebody rings, or a process on this host ends."""
        due = [letter.due for letter in self._letters]
        until = min([time.monotonic() + self.pace.look, *due])
        poll = select.poll()
        poll.register(self._ears, select.POLLIN)
        self._neighbours.register(poll)
        ready = poll.poll(max(1.0, (until - time.monotonic()) * 1e3))
        if any(fd == self._ears for fd, _ in ready):
            os.read(self._ears, 4096)

    def _send(self, now: float) -> None:
        for letter in [*self._letters]:
            if letter.due <= now:
                mine = attrs.evolve(letter.failure, incarnation=self._presence.incarnation)
                self._with_board(functools.partial(Board.publish, failure=mine))
                with self._changed:
                    if letter in self._letters:
                        self._letters.remove(letter)
                letter.sent.set()

    def _read_news(self, board: Board, now: float) -> None:
        for failure in board.news():
            self._note(failure, now)

    def _note(self, failure: FailureReport, now: float) -> None:
        """Remember what a rank has told, unless an earlier relay of it did."""
        rank = failure.rank
        if rank == self.rank:
            return
        if rank not in self._presences and self._board is not None:
            self._meet(self._board, [rank])
        presence = self._presences.get(rank)
        if presence is None or presence.incarnation != failure.incarnation:
            return
        if failure.is_retracted:
            self._known.pop(rank, None)
            return
        self._known[rank] = failure
        self._since[rank] = now
        if failure.takes_store:
            self._say_goodbye()

    def _note_ended(self, ended: Iterable[int], now: float) -> None:
        for rank in ended:
            known = self._known.get(rank)
            if known is not None and known.is_final:
                continue
            presence = self._presences[rank]
            if self._has_left(rank):
                self._neighbours.remove(rank)
                self._presences.pop(rank)
                continue
            message = f"process {presence.pid} is gone, and has said nothing: killed, crashed or ended by os._exit()"
            self._accuse(rank, message, now)

    def _accuse(self, rank: int, message: str, now: float) -> None:
        """Note that a rank is gone, and tell those who cannot see it."""
        known = self._known.get(rank)
        if known is not None and not known.is_departure:
            # Its last words say more than its end.
            death = attrs.evolve(known, is_final=True)
        else:
            death = FailureReport.death(rank, message)
        death = attrs.evolve(death, incarnation=self._presences[rank].incarnation)
        self._known[rank] = death
        self._since[rank] = now
        if any(each.host != self._presence.host for each in self._presences.values()):
            self._with_board(lambda board: board.publish(death))

    def _has_left(self, rank: int) -> bool:
        """Whether a rank whose process has ended had taken its keys away before."""
        board = self._board
        found: list[bool] = []
        if board is not None:
            self._with_board(lambda board: found.append(not [*board.presences([rank])]))
        return any(found)

    def _meet(self, board: Board, ranks: Iterable[int] = ()) -> None:
        """Get to know the processes of ranks that are not known yet."""
        wanted = [*ranks] or self._unknown[:_AT_ONCE]
        for rank, presence in board.presences(wanted):
            if rank in self._unknown:
                self._unknown.remove(rank)
            self._presences[rank] = presence
            if presence.host == self._presence.host:
                self._neighbours.add(rank, presence.pid, presence.start)
        # Those that do not answer wait for the others' turn.
        asked = [rank for rank in self._unknown if rank in wanted]
        self._unknown = [rank for rank in self._unknown if rank not in wanted] + asked

    def _feel_pulses(self, board: Board, now: float) -> None:
        """Beat, and look at the beat of the next rank that is on another host: somebody looks at each host."""
        size = len(self._presences) + len(self._unknown) + 1
        others = [(self.rank + step) % size for step in range(1, size)]
        foreign = [
            rank
            for rank in others
            if rank in self._presences and self._presences[rank].host != self._presence.host
        ]
        if not foreign:
            return
        if now >= self._next_beat:
            self._next_beat = now + self.pace.beat
            board.beat()
        rank = foreign[0]
        beat = board.beat_of(rank)
        pulse = self._pulses.get(rank)
        if pulse is None or pulse.beat != beat:
            self._pulses = {rank: _Pulse(beat, now)}
            return
        pulse.looks += 1
        if not beat or now - pulse.since < self.pace.silence or pulse.looks < _LEAST_LOOKS:
            return
        host = self._presences[rank].host[1]
        if rank not in self._known:
            pid = self._presences[rank].pid
            self._accuse(
                rank, f"nothing was heard of process {pid} on host {host} for {self.pace.silence:g} s", now
            )

    def _break_groups(self, now: float) -> None:
        for calls in [*self.calls.values()]:
            if calls.is_gone or calls.broken_by is not None:
                continue
            for rank, failure in [*self._known.items()]:
                # Without the store nobody knows whether a rank that ended had left before.
                if rank not in calls.members or (failure.is_death and self._board is None):
                    continue
                # A process that ended closes its connections, mostly, and its peers notice that by themselves.
                speaks = failure.is_consequence or (failure.is_final and not failure.is_death)
                at = self._since[rank] + (0.0 if speaks else self.pace.mercy)
                if now >= at and calls.waits_in_vain_for(failure):
                    calls.break_by(failure)
                    break

    def _leave(self, board: Board) -> None:
        self._send(float("inf"))
        if self.rank != 0:
            board.leave()
            return
        departure = FailureReport.departure(0, "it has destroyed the process group", takes_store=True)
        board.publish(attrs.evolve(departure, issued=self._counts, incarnation=self._presence.incarnation))
        board.leave()
        until = time.monotonic() + self.pace.farewell
        while board.others_are_present() and time.monotonic() < until:
            time.sleep(0.01)

    def _say_goodbye(self) -> None:
        """Leave the store, as rank 0 has: it may have held it."""
        self._with_board(Board.leave)
        self._board = None

    def _with_board(self, use: Callable[[Board], Any]) -> None:
        """Use the store; if it is gone, do without it from now on."""
        board = self._board
        if board is not None:
            try:
                use(board)
            except Exception:
                self._board = None

    def _best(self, calls: GroupCalls, *, only_ended: bool) -> FailureReport | None:
        """The failure that says most about why a collective of the group has failed."""
        if only_ended:
            for rank, pid in self._neighbours.ended().items():
                if rank in calls.members:
                    return FailureReport.death(rank, f"process {pid} is gone")
            return None
        found = [failure for rank, failure in [*self._known.items()] if rank in calls.members]
        found.sort(key=lambda failure: (failure.is_vague, failure.is_departure, failure.is_consequence))
        return found[0] if found else None

    def _post(self, failure: FailureReport, delay: float) -> None:
        letter = _Letter(failure, time.monotonic() + delay)
        if not failure.is_retracted:
            self._own = letter.failure = attrs.evolve(failure, issued=failure.issued or self._counts)
        with self._changed:
            self._letters.append(letter)
        self._ring()

    @property
    def _counts(self) -> dict[str, int]:
        return {calls.name: calls.issued for calls in [*self.calls.values()]}

    def _ring(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError):
            # If the pipe is full, the thread is about to wake up; if it is closed, there is no thread.
            if self._bell is not None:
                os.write(self._bell, b"!")
