"""The collectives that this process issues on one process group, and what became of its ranks."""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Final, Protocol, final

from flatparam_comm.checks import Site
from flatparam_comm.errors import CollectiveError, CommError, PeerError
from flatparam_comm.process_group import c10d
from flatparam_comm.relay.failure import FailureReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GroupCalls", "TellsOfFailures"]

#: Seconds to wait for the reason of a broken connection: the peer's words, or the end of its process.
_PATIENCE: Final = 2.0
#: The kinds of RuntimeError that are no doing of a peer.
_OWN: Final = (CommError, NotImplementedError)
#: The number of own failures that are remembered, to be compared with those of the others.
_REMEMBERED: Final = 64


class TellsOfFailures(Protocol):
    """The relay, as the collectives of one group use it."""

    rank: int

    def explanation(self, calls: GroupCalls, patience: float) -> FailureReport | None:
        """The failure of a peer that explains why a collective of the group has failed; None if none is known."""
        ...

    def tell(self, failure: FailureReport) -> None:
        """Let the other ranks know of a failure of this one."""
        ...

    def tell_error(self, error: BaseException | None, failure: FailureReport) -> None:
        """Let the other ranks know of an exception of this one."""
        ...

    def retract(self) -> None:
        """Let the other ranks know that this one goes on after a failure."""
        ...


@final
class GroupCalls:
    """The count of the collectives on one group, which is the same on all of its ranks at the same collective.

    If a rank fails after its n-th collective, the others wait in vain for its collective n + 1 and those after it.
    """

    __slots__ = (
        "__weakref__",
        "_group",
        "_relay",
        "_takes_care",
        "broken_by",
        "failed_at",
        "issued",
        "members",
        "name",
    )

    def __init__(self, group: ProcessGroup, name: str, relay: TellsOfFailures | None) -> None:
        """Begin to count. Without a relay nothing is told, and nothing is heard."""
        self._group = weakref.ref(group)
        self._relay = relay
        self.name = name
        self.members: dict[int, None] = {} if relay is None else dict.fromkeys(c10d.members_of(group))
        self.issued = 0
        self.broken_by: FailureReport | None = None
        self.failed_at: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        """The counts at which this rank has failed."""
        self._takes_care = False

    @property
    def is_gone(self) -> bool:
        """Whether the group was destroyed."""
        return self._group() is None

    def begin(self, site: Site) -> None:
        """Count a collective that is issued now.

        Raises:
            PeerError: if a rank of the group has failed, so that the group is broken.
        """
        if self._takes_care:
            self._take_care(site)
        self.issued += 1

    def _take_care(self, site: Site) -> None:
        if self.broken_by is not None:
            raise self._error(site, self.broken_by, "the process group is broken, since ")
        self._takes_care = False
        if self._relay is not None:
            self._relay.retract()

    def note_own_failure(self) -> None:
        """Remember that this rank has failed after the collectives that it has issued."""
        self.failed_at.append(self.issued)
        self._takes_care = True

    def waits_in_vain_for(self, failure: FailureReport) -> bool:
        """Whether a collective that was issued here cannot complete, as the rank that failed did not issue it.

        Ranks that fail alike, after the same collective, and all go on, do not wait for each other in vain.
        """
        if failure.is_death:
            return self.issued > 0
        count = failure.issued.get(self.name, 0)
        return self.issued > count and (failure.is_final or count not in self.failed_at)

    def break_by(self, failure: FailureReport) -> None:
        """Make every wait and every later call on the group raise."""
        self.broken_by = failure
        self._takes_care = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Make the backend give up every collective of the group that is under way."""
        group = self._group()
        if group is not None:
            c10d.stop_waiting(group)

    def error_of(self, site: Site, error: Exception, *, waited: bool) -> CommError:
        """The error to raise for one of the backend: what a peer's failure has made of it, or what it says itself.

        Args:
            waited: the backend was waiting for the peers, so that the error may be their doing.
        """
        text = (
            f"the process group failed with {type(error).__name__}: {error}; "
            "look for the first error among the other ranks, or for a rank that did not make this call"
        )
        plain = CollectiveError(site.rank, site.op, site.label, text)
        relay = self._relay
        # A CommError is this package's own, ValueError and TypeError are about arguments, NotImplementedError is about
        # the backend.
        if relay is None or not isinstance(error, RuntimeError) or isinstance(error, _OWN):
            return plain
        failure = self.broken_by or relay.explanation(self, _PATIENCE if waited else 0.0)
        if failure is not None:
            self.broken_by, self._takes_care = failure, True
            return self._error(site, failure, "")
        relay.tell_error(plain, FailureReport.of(relay.rank, plain, ""))
        return plain

    def _error(self, site: Site, failure: FailureReport, prefix: str) -> CommError:
        relay = self._relay
        assert relay is not None, "only the relay knows of failures"
        cause = failure.as_cause()
        if failure.culprit == relay.rank:
            return CollectiveError(
                site.rank,
                site.op,
                site.label,
                f"the process group is broken, since this rank has failed {cause} while others waited for it; end all "
                "ranks, or destroy the process group on all of them, and start again",
            )
        error = PeerError(
            failure.culprit,
            cause,
            waiting_rank=relay.rank,
            op=site.op,
            label=site.label,
            prefix=prefix,
        )
        relay.tell(failure.passed_on_by(relay.rank))
        return error
