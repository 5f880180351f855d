"""The thread that tells the other ranks of this one's failure, and listens for theirs.

It sleeps until somebody says something. If a peer has failed that this rank waits for, or would wait for, the thread
makes the backend give up; the thread that waited then asks why, and raises `PeerError`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Final, final

import attrs

from flatparam_comm.errors import CommError
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.deadlocks import Stands
from flatparam_guard.failure import FailureReport
from flatparam_guard.group_calls import GroupCalls
from flatparam_guard.positions import Board
from flatparam_guard.relay_settings import RelaySettings
from flatparam_guard.star import CLOSED, GARBLED, Ended, Said, Star
from flatparam_guard.waits import StallWatch

_LOGGER: Final = logging.getLogger("flatparam_guard")
#: The attribute of an exception that was told: it goes when the program drops the exception.
_MARK: Final = "_flatparam_told"


@final
class _Told:
    """A mark on an exception, which most exceptions cannot have a weak reference instead of."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the exception is none that was told.
        return _Told, ()


@final
class Relay:
    """The relay of this process; `run` is its thread. `calls` are those of the groups that take part, by name."""

    def __init__(self, rank: int, size: int, store: Any, settings: RelaySettings) -> None:
        """Prepare rank `rank` of a world of `size`; `store` is for the relay alone."""
        self.rank = rank
        self.settings = settings
        self.calls: dict[str, GroupCalls] = {}
        self.pid = os.getpid()
        self.board: Board | None = None
        # Not every system has memory for it; without it, divergence is not noticed here.
        with contextlib.suppress(OSError, AttributeError):
            self.board = Board()
        self._star = Star(rank, size, store, settings)
        self._pids: dict[int, int | None] = {}
        self._deaf: set[int] = set()
        self._known: dict[int, FailureReport] = {}
        self._since: dict[int, float] = {}
        self._own: FailureReport | None = None
        self._own_mark: weakref.ReferenceType[_Told] | None = None
        self._forgotten: FailureReport | None = None
        self._due = 0.0
        self._forgiven_until = 0.0
        self._may_forgive = False
        self._said: FailureReport | None = None
        self._stalls = StallWatch(rank, settings.stall)
        self._stands = Stands(rank, self._star, settings, self._fail_for)
        self._next_look = 0.0
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self.run, name="flatparam relay", daemon=True)
        self._last: Finalize | None = None

    def start(self) -> None:
        """Begin to listen; returns when rank 0 can hear this one (nobody misses one unheard), or after a moment."""
        # What has raised before there was a relay concerns nobody.
        ACTIVITY.watched = None
        self._thread.start()
        # Python aborts the process if it ends while a thread of its own is inside of torch, as in a call of the store.
        self._last = Finalize(None, self._thread.join, (self.settings.store,), exitpriority=0)
        self._wait(self.settings.connect, lambda: self._star.is_connected or self._star.is_hub)

    @property
    def is_running(self) -> bool:
        """Whether the thread listens."""
        return self._thread.is_alive()

    @property
    def secret(self) -> str:
        """A text that the ranks of the world know, and nobody else; empty before this one has heard of the hub."""
        return self._star.secret

    def set(self, settings: RelaySettings) -> None:
        """Go on with these settings, before the first group takes part."""
        self.settings = settings
        self._stalls = StallWatch(self.rank, settings.stall)
        self._stands.set(settings)

    # What the other threads call

    def tell(self, failure: FailureReport) -> None:
        """Let the other ranks know of a failure of this one: at once, unless the program may catch it and go on."""
        own = self._own
        if own is not None and (own.is_final or (own.is_consequence and not failure.is_final)):
            # Every call after the first on a broken group raises the same.
            return
        if own is not None and own.diverged and not failure.diverged:
            # The exception by which the program learns of the divergence; if nobody knows it, the divergence says more.
            kept = attrs.evolve(own, is_final=failure.is_final, issued={}) if failure.is_vague else failure
            failure = attrs.evolve(kept, diverged=own.diverged)
        if not failure.issued:
            everything = [*self.calls.values()]
            for calls in everything if failure.is_consequence else ():
                if not failure.is_of(calls.members):
                    calls.note_own_failure()
            failure = attrs.evolve(
                failure,
                issued={calls.name: calls.issued for calls in everything},
                failures={calls.name: calls.failures for calls in everything},
            )
        with self._changed:
            self._own = failure
            self._due = time.monotonic() + (self.settings.settle if failure.may_go_on else 0.0)
            self._forgiven_until = time.monotonic() + self.settings.forgiveness
        self._star.wake()

    def tell_error(self, error: BaseException | None, failure: FailureReport) -> None:
        """Let the other ranks know of an exception: of each one once, and once more if it ends the process."""
        mark = None if error is None else vars(error).get(_MARK)
        is_known = mark is not None and self._own_mark is not None and mark is self._own_mark()
        if is_known and not failure.is_final:
            return
        if is_known and self._own is not None:
            # What the rank was doing was told when the exception was raised.
            failure = attrs.evolve(self._own, is_final=True)
        if error is not None and not is_known:
            mark = vars(error)[_MARK] = _Told()
        self._own_mark = None if mark is None else weakref.ref(mark)
        # If a collective has failed here, the group is broken, whatever the program does about it.
        self._may_forgive = not isinstance(error, CommError)
        for calls in [*self.calls.values()]:
            calls.note_own_failure()
        self.tell(failure)

    def tell_departure(self, message: str) -> None:
        """Let the other ranks know that this one ends; if it has failed, that is why."""
        own = self._own
        if own is None:
            self.tell(FailureReport.departure(self.rank, message))
        elif not own.is_final:
            self.tell(attrs.evolve(own, is_final=True))

    def give_up(self) -> None:
        """If this rank has failed, make the backend give up what is under way: the process could not end."""
        if self._own is not None and not self._own.is_departure:
            for calls in [*self.calls.values()]:
                calls.stop_waiting()

    def flush(self) -> None:
        """Return when everything is told, or after a moment."""
        self._wait(self.settings.flush, lambda: self._said is self._own or not self.is_running)

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not is_done() and time.monotonic() < deadline:
                self._changed.wait(0.05)

    def explanation(self, calls: GroupCalls, patience: float) -> FailureReport | None:
        """Return the failure of a peer that explains why a collective of the group failed; waits `patience` for it."""
        deadline = time.monotonic() + patience
        while True:
            found = self._best(calls)
            if (found is not None and not found.is_vague) or not self.is_running:
                return found
            if time.monotonic() >= deadline:
                return found
            with self._changed:
                self._changed.wait(0.05)

    @property
    def caught(self) -> str:
        """Tell, for the end of a message, of a failure that the program has caught, if no optimizer stepped since."""
        last = self._own or self._forgotten
        if last is None or not last.may_go_on or last.steps != ACTIVITY.steps:
            return ""
        return f"; rank {self.rank} had failed {last.as_cause()}, and its program caught that and went on"

    def final_failure(self, calls: GroupCalls) -> FailureReport | None:
        """Return the failure of a member of the group that will issue no collective any more."""
        known = [*self._known.items()]
        return next((each for rank, each in known if rank in calls.members and each.is_final), None)

    def end_of(self, rank: int) -> str:
        """The end of the process of `rank`, which has come or is about to; empty if it lives, as far as known."""
        known = self._known.get(rank)
        return "" if known is None or not known.is_final else f"it has failed {known.as_cause()}"

    def join(self, calls: GroupCalls) -> None:
        """Have a group take part."""
        self.calls[calls.name] = calls
        self._star.wake()

    def end(self) -> None:
        """Stop listening; returns after a moment at most."""
        self.tell_departure("it has destroyed the process group")
        self._is_ending.set()
        self._star.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(self.settings.flush)
        if self._last and not self.is_running:
            self._last.cancel()

    def forget(self) -> None:
        """Become deaf and dumb in a forked process: the thread and the connections are the parent's."""
        self.calls.clear()
        self._is_ending.set()
        # Another thread may have held it when the process was forked.
        self._changed = threading.Condition()
        self._close(self._star.drop)

    # The thread

    def run(self) -> None:
        """Tell and listen until the end."""
        try:
            self._star.open()
            self._star.say({"pid": self.pid, "failure": None})
            while not self._is_ending.is_set():
                for news in self._star.listen(self._patience()):
                    self._note_if_possible(news)
                self._look_at_watched()
                self._take_back()
                self._say_own()
                self._break_groups()
                self._look_at_waits()
                self._look_at_stalls()
                with self._changed:
                    self._changed.notify_all()
            self._say_own()
        except Exception:
            # A healthy run must not suffer from its relay. Without one, failures do not travel; nothing else changes.
            if not self._is_ending.is_set():
                text = "the relay of rank %d has failed: training goes on, but failures of ranks no longer travel here"
                _LOGGER.warning(text, self.rank, exc_info=True)
                with contextlib.suppress(Exception):
                    self._star.say({"pid": self.pid, "failure": None, "is_deaf": True})
        finally:
            self._close(self._star.close)

    def _close(self, close_star: Any) -> None:
        with self._changed, contextlib.suppress(OSError):
            close_star()
            for calls in [*self.calls.values()]:
                calls.leave_board()
            if self.board is not None:
                self.board.close()
            self.board = None
            self._changed.notify_all()

    def _patience(self) -> float:
        """Return the seconds until it is time to say something, or to give up a peer that has not gone on."""
        now = time.monotonic()
        own = self._own
        settings = self.settings
        moments = [self._due] if own is not self._said and not self._is_forgiven else []
        moments += [now + settings.settle] if own is not None and own.may_go_on else []
        ends = [since + settings.mercy for since in self._since.values()]
        if ends:
            ends += [calls.joined + settings.mercy for calls in [*self.calls.values()]]
        moments += [end for end in ends if end > now]
        moments += [self._stands.due] if self._stands.due > now else []
        return min([settings.sleep, *(max(0.0, moment - now) + 0.005 for moment in moments)])

    def _look_at_watched(self) -> None:
        watched = ACTIVITY.watched
        if watched is None or watched.is_under_way or ACTIVITY.watched is not watched:
            return
        ACTIVITY.watched = None
        # If the program has caught the exception and issued a collective since, it goes on.
        if ACTIVITY.issued == watched.issued:
            error = watched.error
            self.tell_error(error, FailureReport.of(self.rank, error, watched.where))

    def _take_back(self) -> None:
        """Forget an exception of this rank that the program has caught: it has issued a collective since.

        It has to be on a group that is not broken: if another rank had failed, on one without that rank, or a later
        one; if ranks diverge, on a later one.
        """
        own = self._own
        if own is None or own.is_final:
            return
        everything = [*self.calls.values()]
        if not own.may_go_on:
            if self._said is not own:
                return
            everything = [calls for calls in everything if calls.name not in own.issued or not own.is_of(calls.members)]
        issued = {calls.name: calls.issued for calls in everything}
        if any(count > own.issued.get(name, 0) for name, count in issued.items()):
            with self._changed:
                if self._own is own:
                    self._forgotten, self._own, self._own_mark = own, None, None
                    self._known.pop(self.rank, None)

    @property
    def _is_forgiven(self) -> bool:
        """Whether the program has dropped the exception, so that it seems to go on; it may load data, say.

        While it handles the exception, or a notebook or a test keeps it, nothing says that the rank will go on.
        """
        own, mark = self._own, self._own_mark
        is_dropped = self._may_forgive and mark is not None and mark() is None
        return own is not None and own.may_go_on and is_dropped and time.monotonic() < self._forgiven_until

    def _say_own(self) -> None:
        own = None if self._is_forgiven and not self._is_ending.is_set() else self._own
        is_due = own is None or time.monotonic() >= self._due or self._is_ending.is_set()
        if own is self._said or not is_due:
            return
        told = None if own is None else own.to_words()
        self._star.say({"pid": self.pid, "failure": told})
        with self._changed:
            self._said = own

    def _note_if_possible(self, news: Said | Ended) -> None:
        try:
            self._note(news)
        except (AttributeError, KeyError, TypeError, ValueError):
            # It may be of another version; nobody else's failures must be missed for it.
            _LOGGER.warning("rank %d cannot read what rank %d says", self.rank, news.rank, exc_info=True)

    def _note(self, news: Said | Ended) -> None:
        rank = news.rank
        if isinstance(news, Said) and "stand" in news.words:
            self._stands.note(rank, news.words)
            return
        if isinstance(news, Said) and "question" in news.words:
            self._look_at_waits(news.words["question"])
            return
        if isinstance(news, Said):
            self._pids[rank] = news.words["pid"]
            self._deaf.discard(rank)
            if news.words.get("is_deaf"):
                self._deaf.add(rank)
            told = news.words["failure"]
            failure = None if told is None else FailureReport.from_words(told)
        else:
            known = self._known.get(rank)
            # The connection of a rank whose relay has failed says nothing about its process.
            self._stands.forget(rank)
            if (known is not None and known.is_final) or rank in self._deaf:
                return
            if news.reason == GARBLED:
                _LOGGER.warning("the relay of rank %d has lost that of rank %d: %s", self.rank, rank, GARBLED)
                return
            failure = self._death_of(rank, news.reason)
            if self._star.is_hub:
                self._star.say_for(rank, {"pid": self._pids.get(rank), "failure": failure.to_words()})
        if failure is None:
            self._known.pop(rank, None)
            self._since.pop(rank, None)
            return
        if rank == self.rank and not (self._own is not None and self._own.is_final):
            self._be_told(failure)
        self._known[rank] = failure
        self._since[rank] = time.monotonic()
        for calls in [*self.calls.values()]:
            calls.take_care()
        if failure.diverged:
            self._stands.leave_calls_of_torch(failure)

    def _be_told(self, failure: FailureReport) -> None:
        """Learn from the hub that this rank has failed: it waits for others which wait for it."""
        everything = [*self.calls.values()]
        own = attrs.evolve(failure, issued={calls.name: calls.issued for calls in everything})
        with self._changed:
            self._own = self._said = own
            self._own_mark = None

    def _death_of(self, rank: int, reason: str) -> FailureReport:
        known = self._known.get(rank)
        if known is not None:
            # Its last words say more than its end.
            return attrs.evolve(known, is_final=True)
        process = f"process {self._pids.get(rank, 'unknown')}"
        text = f"{process} has ended without a word ({reason}): killed, crashed, or ended by os._exit()"
        if reason != CLOSED:
            text = f"{process} has ended, or its host cannot be reached any more ({reason})"
        return FailureReport.death(rank, text)

    def _break_groups(self) -> None:
        now = time.monotonic()
        for calls in [*self.calls.values()]:
            if calls.is_gone:
                self.calls.pop(calls.name, None)
                calls.leave_board()
                continue
            for rank, failure in [*self._known.items()]:
                if calls.broken_by is not None or not (rank in calls.members or self._is_lost_hub(rank, failure)):
                    continue
                since, mercy = self._since[rank], self.settings.mercy
                if failure.is_final:
                    mercy = 0.0
                elif calls.name not in failure.issued:
                    # The rank may be about to issue its first collective on this group.
                    since = max(since, calls.joined)
                elif failure.is_consequence and failure.is_of(calls.members):
                    mercy = 0.0
                # Both have failed for a third rank's sake, but this one may have gone elsewhere.
                is_idle = failure.is_consequence and now >= since + self.settings.idle
                is_late = now >= since + mercy and calls.waits_in_vain_for(failure, is_idle=is_idle)
                if calls.name in failure.diverged or is_late:
                    calls.break_by(failure)

    def _look_at_waits(self, question: int = 0) -> None:
        own = self._own
        if own is not None and own.is_consequence and not own.is_final:
            # On groups without the culprit it may go on.
            own = own if time.monotonic() >= self._due + self.settings.idle else None
        is_told = own is not None and self._said is own
        self._stands.look([*self.calls.values()], own, is_told=is_told, question=question)
        asked = self._stands.ask()
        if asked:
            self._look_at_waits(asked)

    def _fail_for(self, rank: int, failure: FailureReport) -> None:
        """On the hub, tell all ranks, `rank` too, of a failure of `rank` that it does not know of."""
        words = {"pid": self._pids.get(rank), "failure": failure.to_words()}
        self._star.say_for(rank, words, to_itself=True)
        self._note(Said(rank, words))

    def _look_at_stalls(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        # Each look copies a page of each rank.
        self._next_look = now + self.settings.stall / 4
        for calls in [*self.calls.values()]:
            standings = {} if calls.broken_by is not None or self._known else calls.standings()
            warning = self._stalls.look(calls.name, standings, now) if len(standings) > 1 else None
            if warning is not None:
                _LOGGER.warning("%s", warning)

    def _is_lost_hub(self, rank: int, failure: FailureReport) -> bool:
        """Return whether `rank` has passed on the news and has failed: no news of any other rank can come any more."""
        is_hub = rank == self._star.hub and self.rank != rank
        return is_hub and failure.is_final and not failure.is_departure and not self._star.is_connected

    def _best(self, calls: GroupCalls) -> FailureReport | None:
        """Return the failure that says most about why a collective of the group has failed."""
        found = [failure for rank, failure in [*self._known.items()] if rank in calls.members]
        found.sort(key=lambda failure: (failure.is_vague, failure.is_departure, failure.is_consequence))
        return found[0] if found else None
