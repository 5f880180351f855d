"""Where the ranks stand: what this one tells the hub of itself, and what the hub makes of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import attrs

from flatparam_comm.process_group import groups
from flatparam_guard.calls import GroupCalls
from flatparam_guard.failure import FailureReport
from flatparam_guard.settings import RelaySettings
from flatparam_guard.star import Star
from flatparam_guard.waiting.deadlocks import Deadlocks, Knot
from flatparam_guard.waiting.idle import IdleWatch
from flatparam_guard.waiting.waits import Stand, WaitWatch

__all__ = ["Stands"]

_LOGGER: Final = logging.getLogger("flatparam_guard")


@final
class Stands:
    """The stand of this rank, which it tells the hub; on the hub those of all ranks."""

    def __init__(
        self, rank: int, star: Star, settings: RelaySettings, fail: Callable[[int, FailureReport], None]
    ) -> None:
        """Begin with ranks that go on.

        Args:
            fail: tells all ranks of a failure of this rank or another one, which waits for ever.
        """
        self._rank = rank
        self._star = star
        self._fail = fail
        self._waits = WaitWatch(settings.stand)
        self._idle = IdleWatch(rank, settings.idle)
        self._deadlocks = Deadlocks()
        self._stand: Stand | None = None

    def set(self, settings: RelaySettings) -> None:
        """Go on with these settings."""
        self._waits.patience, self._idle.patience = settings.stand, settings.idle

    @property
    def due(self) -> float:
        """The moment at which to look again, if it has not passed."""
        return self._waits.due

    def look(
        self,
        calls: Iterable[GroupCalls],
        own: FailureReport | None,
        *,
        is_told: bool,
        question: int = 0,
    ) -> None:
        """Tell the hub where this rank stands, if that is new, or if it has asked.

        Args:
            own: the failure of this rank, if it has failed and has not gone on.
            is_told: whether the others know of it.
            question: the number of the hub's question.
        """
        now = time.monotonic()
        stand = self._waits.look(calls, self._idle.look(now) if own is None else own, now)
        # One that has failed, and goes on to another call, ends the waits of the others by its failure.
        if own is not None and (not is_told or own.is_departure or (stand is not None and stand.waits)):
            stand = None
        before, self._stand = self._stand, stand
        if question or (stand and stand.key) != (before and before.key):
            told = {"stand": None if stand is None else stand.to_words(), "answers": question}
            if self._star.is_hub:
                self.note(self._rank, told)
            else:
                self._star.tell(self._star.hub, self._rank, told)

    def ask(self) -> int:
        """On the hub, ask the ranks that seem stuck.

        Returns:
            The number of the question, if this rank is one of them; else 0.
        """
        number, ranks = self._deadlocks.next_question()
        for rank in ranks:
            self._star.tell(rank, self._rank, {"question": number})
        return number if self._rank in ranks else 0

    def note(self, rank: int, told: dict[str, Any]) -> None:
        """On the hub: `rank` has told where it stands."""
        stand = None if told["stand"] is None else Stand.from_words(told["stand"])
        self._deadlocks.note(rank, stand, told["answers"])
        knot = self._deadlocks.found()
        if knot is not None:
            self._cut(knot)

    def forget(self, rank: int) -> None:
        """The rank has ended."""
        self._deadlocks.forget(rank)

    def _cut(self, knot: Knot) -> None:
        """End the waits of ranks that wait for each other: each of them is told on behalf of one of its group."""
        for rank in knot.speakers:
            failure = FailureReport.divergence(rank, knot.groups, knot.description)
            if knot.cause is not None:
                failure = attrs.evolve(knot.cause.passed_on_by(rank), diverged=knot.groups)
            self._fail(rank, attrs.evolve(failure, issued=knot.stands[rank].counts))

    def leave_calls_of_torch(self, failure: FailureReport) -> None:
        """End a wait in vain in a call of torch's own, whose error says nothing of the cause: so the log does."""
        stand, self._stand = self._stand, None
        for wait in () if stand is None else stand.waits:
            if wait.is_torchs and wait.group in failure.diverged:
                text = "rank %d: %s cannot be completed, rank %d failed first %s"
                _LOGGER.error(text, self._rank, wait.text, failure.culprit, failure.as_cause())
                group = groups.group_named(wait.group)
                if group is not None:
                    groups.stop_waiting(group)
