"""The collectives that this process issues on one process group, and what became of its ranks."""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

import attrs
import torch

from flatparam_comm.checks import Site
from flatparam_comm.errors import CollectiveError, CommError, MismatchError, PeerError
from flatparam_comm.guarding import backend_error
from flatparam_comm.process_group import groups
from flatparam_guard import torch_groups
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.failure import FailureReport
from flatparam_guard.positions import Board, Offer, Page, Position, Standing, Standings, code_of
from flatparam_guard.relay_settings import RelaySettings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

#: The kinds of RuntimeError that are no doing of a peer.
_OWN: Final = (CommError, NotImplementedError)
#: The number of own failures that are remembered, to be compared with those of the others.
_REMEMBERED: Final = 64


class TellsOfFailures(Protocol):
    """The relay, as the collectives of one group use it."""

    rank: int
    settings: RelaySettings

    @property
    def caught(self) -> str:
        """Tell, for the end of a message, of a failure that the program has caught; empty if there is none."""

    def explanation(self, calls: GroupCalls, patience: float) -> FailureReport | None:
        """The failure of a peer that explains why a collective of the group has failed; None if none is known."""

    def final_failure(self, calls: GroupCalls) -> FailureReport | None:
        """Return the failure of a member of the group that will issue no collective any more."""

    def tell(self, failure: FailureReport) -> None:
        """Let the other ranks know of a failure of this one."""

    def tell_error(self, error: BaseException | None, failure: FailureReport) -> None:
        """Let the other ranks know of an exception of this one."""


@final
class GroupCalls:
    """The collectives of this process on one group, and the failures of the group's ranks.

    Their count is the same on all of its ranks at the same collective.

    If a rank fails after its n-th collective, the others wait in vain for its collective n + 1 and those after it.
    """

    __slots__ = (
        "__weakref__",
        "_board",
        "_goes_through_gloo",
        "_group",
        "_has_met",
        "_is_forked",
        "_is_meeting",
        "_page",
        "_relay",
        "_standings",
        "_takes_care",
        "broken_by",
        "failed_at",
        "issued",
        "joined",
        "members",
        "name",
    )

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        relay: TellsOfFailures | None,
        board: Board | None,
        *,
        goes_through_gloo: bool,
    ) -> None:
        """Begin to count. Without a relay nothing is told or heard, and without a board nothing is compared.

        Args:
            goes_through_gloo: the collectives are gloo's, which ends the process if ranks diverge.
        """
        self.issued = 0
        self._takes_care = goes_through_gloo
        """Whether to look for failures when the next collective is issued."""
        self._page: Page | None = None
        self._group = weakref.ref(group)
        self._relay = relay
        self.name = name
        self.joined = time.monotonic()
        self.members: list[int] = [] if relay is None else groups.members_of(group)
        self._board = board
        self._standings: Standings | None = None
        self._goes_through_gloo = goes_through_gloo
        self._has_met = not goes_through_gloo
        self._is_forked = False
        self._is_meeting = False
        self.broken_by: FailureReport | None = None
        self.failed_at: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        """The counts at which this rank has failed."""

    @property
    def is_gone(self) -> bool:
        """Whether the group was destroyed."""
        return self._group() is None

    def begin(self, site: Site, dtype: torch.dtype | None = None, numel: int = 0, detail: int = 0) -> None:
        """Count a collective that is issued now, and compare it with those of the ranks that were here before.

        Args:
            dtype: the dtype of its tensors.
            numel: the number of elements of the longest of them.
            detail: the reduction, or the root.

        Raises:
            PeerError: if a rank of the group has failed, so that the group is broken.
            MismatchError: if a rank of this host has issued a different collective.
        """
        if self._takes_care:
            self._look_around(site)
        # What `note` does, without a call of it for each collective.
        self.issued += 1
        ACTIVITY.issued += 1
        ACTIVITY.handled = id(sys.exc_info()[1])
        if self._page is not None:
            other = self._page.enter(self.issued, site, code_of(site.op, dtype, detail), numel)
            if other is not None:
                raise self._diverged(site, (code_of(site.op, dtype, detail), numel), *other)

    def note(self, site: Site, dtype: torch.dtype | None, numel: int, detail: int) -> tuple[int, int, int] | None:
        """Count a collective that is issued now; arguments as `begin`.

        Returns:
            See `Page.enter`; None if nothing is compared.
        """
        self.issued += 1
        ACTIVITY.issued += 1
        ACTIVITY.handled = id(sys.exc_info()[1])
        if self._page is None:
            return None
        return self._page.enter(self.issued, site, code_of(site.op, dtype, detail), numel)

    def wait_for(self, site: Site, number: int, wait: Callable[[], T]) -> T:
        """Return the result of `wait`, which returns when collective `number` is complete.

        Raises:
            CommError: in the place of an exception of the backend; it names the rank, the collective, and who failed
                first.
        """
        thread, waits = threading.get_ident(), ACTIVITY.waits
        before = waits.get(thread)
        waits[thread] = (self, number, site.op, site.label)
        try:
            try:
                return wait()
            finally:
                waits[thread] = before
        except CollectiveError:
            raise
        except Exception as error:
            raise self.error_of(site, error, waited=True) from error
        except BaseException:
            # An interrupt: of what the others wait for, only a part may have been sent.
            self.issued -= 1
            raise

    def enter_wait(self, site: Site, number: int) -> tuple[Any, int, str, str] | None:
        """From now on this thread waits until each rank of the group has issued collective `number`.

        Returns:
            What it has waited in before, for `end_wait`.
        """
        thread = threading.get_ident()
        before = ACTIVITY.waits.get(thread)
        ACTIVITY.waits[thread] = (self, number, site.op, site.label)
        return before

    def end_wait(self, before: tuple[Any, int, str, str] | None) -> None:
        """This thread waits no longer, or in what it has waited in before."""
        ACTIVITY.waits[threading.get_ident()] = before

    def _look_around(self, site: Site) -> None:
        relay = self._relay
        self._check_process(site)
        if self.is_gone:
            # The engine says so.
            return
        if self.broken_by is not None:
            raise self._error(site, self.broken_by, "the process group is broken, since ")
        self._takes_care = False
        if not self._has_met:
            self._has_met = True
            self._meet(site)
        final = None if relay is None else relay.final_failure(self)
        if final is not None:
            self._takes_care = True
            # That rank may have issued what this one is about to issue.
            if self.waits_in_vain_for(final, self.begun + 1):
                self.broken_by = final
                raise self._error(site, final, "")

    def _meet(self, site: Site) -> None:
        """Find the other ranks' memory. It is the group's first collective, and returns when all ranks have come."""
        group = self._group()
        assert group is not None, "a collective is about to be issued on it"
        self._is_meeting = True
        try:
            before = self.enter_wait(site, self.begun)
            try:
                self.meet(lambda offer: groups.exchange(offer, group))
            finally:
                self.end_wait(before)
        except Exception as error:
            raise self.error_of(site, error, waited=True) from error
        finally:
            self._is_meeting = False

    def meet(self, exchange: Callable[[Offer | None], list[Any]]) -> None:
        """Find the memory of the other ranks, which call this, too; `exchange` returns every rank's argument."""
        board = self._board
        page = None if board is None else board.page(self.name)
        offers = exchange(None if page is None or board is None else board.offer)
        if board is None or page is None:
            return
        for rank, offer in zip(self.members, offers, strict=True):
            if offer is not None and self._relay is not None and rank != self._relay.rank:
                board.attach(rank, offer)
        self._page, self._standings = page, Standings(page, board)
        self._standings.find(self.members)

    def _diverged(self, site: Site, ours: tuple[int, int], peer: int, code: int, numel: int) -> MismatchError:
        relay = self._relay
        assert relay is not None, "there is no page without a relay"
        text = (
            f"ranks diverge at collective {self.issued} of group {self.name!r}: rank {relay.rank} issues "
            f"{Position.from_words(*ours)}, and rank {peer} has issued {Position.from_words(code, numel)}; make every "
            f"rank call the same units, passes and state functions in one order{relay.caught}"
        )
        self._tell_divergence(text)
        return MismatchError(site.rank, site.op, site.label, text)

    @property
    def begun(self) -> int:
        """The collectives that are issued, with the meeting, which comes before the first one is counted."""
        return self.issued + self._is_meeting

    def place_of(self, number: int) -> int:
        """Return the number of collective `number` among all of the process group, torch's own too, or a later one.

        It is 0 if it does not go through the process group.
        """
        group = self._group()
        if group is None or self.name != groups.name_of(group):
            return 0
        return torch_groups.count_of(group) - (self.begun - number)

    @property
    def failures(self) -> int:
        """The number of failures of this rank since its last collective."""
        return self.failed_at.count(self.issued)

    def forbid(self) -> None:
        """Refuse each further collective, since this process was forked from the one that has the connections."""
        self._is_forked = self._takes_care = True

    def _check_process(self, site: Site) -> None:
        if self._is_forked:
            text = (
                "expected the process in which the ranks were connected, found one forked from it; call collectives "
                "only in the process that is the rank: a DataLoader's workers, say, must not call a sharded model"
            )
            raise CollectiveError(site.rank, site.op, site.label, text)

    def standings(self) -> dict[int, Standing]:
        """The last collective of each rank of this host, by its number in the world; empty if nothing is compared."""
        known, relay = self._standings, self._relay
        if known is None or relay is None:
            return {}
        return {**known.others(), relay.rank: known.own(f"process {os.getpid()}")}

    def leave_board(self) -> None:
        """Compare no longer, and let go of the memory."""
        if self._page is not None:
            self._page.leave()
        self._board = self._page = self._standings = None

    def take_care(self) -> None:
        """Look at the failures of the peers when the next collective is issued."""
        self._takes_care = True

    def note_own_failure(self) -> None:
        """Remember that this rank has failed after the collectives that it has issued."""
        self.failed_at.append(self.issued)

    def waits_in_vain_for(self, failure: FailureReport, begun: int | None = None, *, is_idle: bool = False) -> bool:
        """Whether collective `begun`, by default the last one here, cannot complete: the rank that failed lacks it.

        Ranks that fail alike, after the same collective, and all go on (not `is_idle`), do not wait in vain.
        """
        begun = self.begun if begun is None else begun
        if failure.is_death:
            return begun > 0
        count = failure.issued.get(self.name, 0)
        is_alike = self.failed_at.count(count) >= max(1, failure.failures.get(self.name, 1))
        return begun > count and (failure.is_final or is_idle or not is_alike)

    def break_by(self, failure: FailureReport) -> None:
        """Make every wait and every later call on the group raise."""
        self.broken_by = failure
        self._takes_care = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Make gloo give up every collective of the group that is under way."""
        group = self._group()
        if group is not None and self._goes_through_gloo:
            torch_groups.stop_waiting(group)

    def error_of(self, site: Site, error: Exception, *, waited: bool) -> CommError:
        """The error to raise for one of the backend: what a peer's failure has made of it, or what it says itself.

        Args:
            waited: the backend was waiting for the peers, so that the error may be their doing.
        """
        late = "" if self._standings is None or not waited else self._standings.describe_late(self.issued)
        plain = backend_error(site, error, late)
        relay = self._relay
        # A CommError is this package's own, ValueError and TypeError are about arguments, NotImplementedError is about
        # the backend.
        if relay is None or not isinstance(error, RuntimeError) or isinstance(error, _OWN):
            return plain
        failure = self.broken_by or relay.explanation(self, relay.settings.patience if waited else 0.0)
        if failure is not None:
            self.broken_by, self._takes_care = failure, True
            return self._error(site, failure, "")
        relay.tell_error(plain, FailureReport.of(relay.rank, plain, ""))
        return plain

    def check(self, site: Site, *, patiently: bool = False) -> None:
        """Raise what a peer's failure has made of the collectives of this group, if anything.

        Args:
            patiently: wait some seconds for a peer to say so.
        """
        relay = self._relay
        if patiently and relay is not None:
            self.broken_by = relay.explanation(self, relay.settings.patience) or self.broken_by
        if self.broken_by is not None:
            raise self._error(site, self.broken_by, "")

    def tell(self, error: CommError) -> None:
        """Let the other ranks know of an error of this one, or that ranks diverge, and break the group here."""
        relay = self._relay
        if isinstance(error, MismatchError):
            self._tell_divergence(error.message)
        elif relay is not None:
            relay.tell_error(error, FailureReport.of(relay.rank, error, ""))

    def _tell_divergence(self, text: str) -> None:
        relay = self._relay
        if relay is not None:
            self.broken_by = FailureReport.divergence(relay.rank, (self.name,), text)
            self._takes_care = True
            relay.tell(self.broken_by)

    def _error(self, site: Site, failure: FailureReport, prefix: str) -> CommError:
        relay = self._relay
        assert relay is not None, "only the relay knows of failures"
        if failure.is_death and self._standings is not None:
            last = self._standings.last_of(failure.rank)
            told = f"; its last collective was {last or 'none'}" if last is not None else ""
            failure = attrs.evolve(failure, message=failure.message + told)
        cause = failure.as_cause()
        if failure.diverged and not failure.is_consequence:
            return MismatchError(site.rank, site.op, site.label, prefix + failure.message)
        if failure.culprit == relay.rank:
            return CollectiveError(
                site.rank,
                site.op,
                site.label,
                f"the process group is broken, since this rank has failed {cause} while others waited for it; end all "
                "ranks, or destroy the process group on all of them, and start again",
            )
        error = PeerError(failure.culprit, cause, waiting_rank=relay.rank, op=site.op, label=site.label, prefix=prefix)
        relay.tell(failure.passed_on_by(relay.rank))
        return error
