"""Where the ranks stand, and which wait for each other for ever, as the rank finds that passes on what each says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import attrs

from flatparam_comm.errors import told_by_ranks
from flatparam_guard import torch_groups
from flatparam_guard.failure import FailureReport
from flatparam_guard.group_calls import GroupCalls
from flatparam_guard.relay_settings import RelaySettings
from flatparam_guard.star import Star
from flatparam_guard.waits import IdleWatch, Stand, Wait, WaitWatch

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

    def look(self, calls: Iterable[GroupCalls], own: FailureReport | None, *, is_told: bool, question: int = 0) -> None:
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
                group = torch_groups.group_named(wait.group)
                if group is not None:
                    torch_groups.stop_waiting(group)


# The ranks that wait for each other for ever, as the rank finds them that passes on what each one says.
#
# A rank that has waited for half a second says in what, and what it has issued. If ranks wait for each other, each of
# them is asked once more, so that they are known to have waited all at the same time; if they still do, they are stuck.


_ADVICE: Final = "make every rank call the same units, passes, state functions and collectives of torch in one order"


def stuck_among(stands: Mapping[int, Stand]) -> dict[int, Stand]:
    """Those of the ranks that stand which wait in vain, since those that they wait for do, too, or have failed."""
    left = dict(stands)
    while True:
        free = [rank for rank, stand in left.items() if _is_free(rank, stand, left)]
        if not free:
            return left
        for rank in free:
            del left[rank]


def _is_free(rank: int, stand: Stand, left: Mapping[int, Stand]) -> bool:
    """Return whether a wait of the rank may end, if those in `left` do not go on."""
    for wait in stand.waits:
        others = [each for each in wait.members if each != rank]
        if not wait.is_torchs:
            # Every member has to come.
            if not any(each in left and _is_late(left[each], wait) for each in others):
                return True
            continue
        # Of a call such as `gather`, nobody knows whom it waits for: so all of them have to be stuck.
        if any(each not in left for each in others):
            return True
        if not any(_has_not_joined(left[each], stand, wait) for each in others):
            return True
    return False


def _is_late(other: Stand, wait: Wait) -> bool:
    return other.counts.get(wait.group, 0) < wait.number


def _has_not_joined(other: Stand, mine: Stand, wait: Wait) -> bool:
    """Return whether a rank that stands elsewhere has not issued the call of torch that `wait` is in."""
    if any(each.is_torchs and (each.group, each.number) == (wait.group, wait.number) for each in other.waits):
        return False
    if other.of_torch.get(wait.group, 0) < wait.number:
        return True
    # On one process group, it may have issued another collective in its place: one of ours, that this rank has not.
    return any(
        not each.is_torchs and each.at <= wait.at and _is_late(mine, each) and each.group == wait.group
        for each in other.waits
    )


@final
@attrs.frozen
class Knot:
    """Ranks that wait for each other for ever."""

    stands: dict[int, Stand]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that they wait in."""
        return tuple(dict.fromkeys(wait.group for stand in self.stands.values() for wait in stand.waits))

    @property
    def speakers(self) -> list[int]:
        """A rank of each place: it is a member of the group in which the ranks of that place wait."""
        places: dict[tuple[str, int], int] = {}
        for rank, stand in sorted(self.stands.items()):
            for wait in stand.waits:
                places.setdefault((wait.group, wait.number), rank)
        return sorted({*places.values()})

    @property
    def cause(self) -> FailureReport | None:
        """The failure of a rank that the others wait for."""
        found = [stand.failure for _, stand in sorted(self.stands.items()) if stand.failure is not None]
        return found[0] if found else None

    @property
    def description(self) -> str:
        """The message, if no rank has failed."""
        rows = [
            (rank, f"waits in {' and in '.join(_told(each) for each in stand.waits)}")
            for rank, stand in sorted(self.stands.items())
        ]
        return told_by_ranks("the ranks diverge: they wait for each other in different calls", rows, _ADVICE)


def _told(wait: Wait) -> str:
    return wait.text if wait.is_torchs else f"{wait.text} of group {wait.group!r}"


@final
class Deadlocks:
    """The ranks that wait, as far as the rank knows that passes on what each one says."""

    def __init__(self) -> None:
        """Begin with ranks that go on."""
        self._stands: dict[int, Stand] = {}
        self._serial = 0
        self._asked: dict[int, int] = {}
        self._answers: dict[int, Stand] = {}
        self._is_changed = False

    def note(self, rank: int, stand: Stand | None, serial: int) -> None:
        """A rank stands, or goes on; `serial` is that of the question that it answers, or 0."""
        if stand is None:
            self._stands.pop(rank, None)
        else:
            self._stands[rank] = stand
        if serial and serial == self._serial and rank in self._asked:
            if stand is None or stand.key != self._asked.pop(rank):
                # It went on meanwhile.
                self._drop_question()
            else:
                self._answers[rank] = stand
        self._is_changed = True

    def forget(self, rank: int) -> None:
        """The rank has ended."""
        if self._stands.pop(rank, None) is not None:
            self._drop_question()

    def _drop_question(self) -> None:
        self._asked, self._answers = {}, {}

    def next_question(self) -> tuple[int, list[int]]:
        """Return the number of a question, and the ranks to ask where they stand now; none if nobody seems stuck."""
        if self._asked or not self._is_changed:
            return 0, []
        self._is_changed = False
        stuck = stuck_among(self._stands)
        if not any(stand.waits for stand in stuck.values()):
            return 0, []
        self._serial += 1
        self._asked = {rank: stand.key for rank, stand in stuck.items()}
        return self._serial, [*self._asked]

    def found(self) -> Knot | None:
        """Return the ranks that are stuck, once each; None if there are none, as far as known."""
        if self._asked or not self._answers:
            return None
        stuck = stuck_among(self._answers)
        self._answers = {}
        for rank, stand in stuck.items():
            if stand.waits:
                del self._stands[rank]
        return Knot(stuck) if any(stand.waits for stand in stuck.values()) else None
