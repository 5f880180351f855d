"""The ranks whose processes live after a failure: they can still tell each other small values, through the store."""

from __future__ import annotations

import collections
import hmac
import pickle
import time
from datetime import timedelta
from typing import Any, Final, final

import attrs

from flatparam_comm.collectives import Collectives
from flatparam_comm.errors import CollectiveError
from flatparam_comm.process_group import engine, groups
from flatparam_guard.activity import ACTIVITY
from flatparam_guard.process import end_of_process, secret_of_ranks, tell_failure

#: The longest wait for a peer's last key, in seconds: the values were exchanged, only the end is waited for.
_LEAVING_SECONDS: Final = 3.0
#: The bytes of a signature.
_SIGNATURE: Final = 32
#: Seconds between two looks at the store.
_LOOK_SECONDS: Final = 0.02


@final
@attrs.define(eq=False)
class Survivors:
    """All ranks of a process group after one of them has failed, if every process lives.

    The group's connections may be closed, but the store that it was made with is there: ranks exchange small values
    through it. If a rank does not come, each of the others raises `CollectiveError`.
    """

    rank: int
    size: int
    _members: list[int]
    """The ranks' numbers in the world."""
    _store: Any
    _seconds: float
    _meeting: str
    _secret: bytes = attrs.field(repr=False)
    _exchanges: int = 0

    @classmethod
    def of(cls, ranks: Collectives, error: BaseException | None, seconds: float) -> Survivors:
        """Meet the others; every rank calls it where it has caught its exception.

        Args:
            ranks: collectives over a process group, through whatever decorators; also those through shared memory.
            error: this rank's exception. The ranks that wait for this one in a collective stop waiting.
            seconds: how long each exchange waits for the slowest rank.

        Raises:
            CollectiveError: if the ranks are no processes, or their group has no store.
        """
        group = engine.process_group_of(ranks)
        store, prefix = None, ""
        if group is not None:
            name = groups.name_of(group)
            _MEETINGS[name] += 1
            prefix = f"flatparam survivors {name} {_MEETINGS[name]}"
            store = groups.store_of(group, prefix, timedelta(seconds=seconds))
        if group is None or store is None:
            raise CollectiveError(
                ranks.rank,
                "survivors",
                "",
                "expected ranks that are processes of a process group with a store, found none: after a failure such "
                "ranks have no way to each other",
            )
        tell_failure(error)
        secret = secret_of_ranks().encode()
        if not secret:
            raise CollectiveError(
                ranks.rank,
                "survivors",
                "",
                "expected a relay, by which ranks know a secret, found none: without it nobody knows who has written "
                "to the store; leave the relay on (FLATPARAM_RELAY, set_relay)",
            )
        return cls(ranks.rank, ranks.size, groups.members_of(group), store, seconds, prefix, secret)

    @property
    def steps(self) -> int:
        """The optimizer steps that this process has done."""
        return ACTIVITY.steps

    @property
    def is_in_step(self) -> bool:
        """Whether this process's last optimizer step has not ended: its exception came out of it."""
        return ACTIVITY.is_in_step

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return every rank's picklable `value`, in rank order.

        Raises:
            CollectiveError: if a rank has not come in time.
        """
        self._exchanges += 1
        key = f"{self._exchanges}/{self.rank}"
        mine = pickle.dumps(value)
        self._store.set(key, self._signature(key, mine) + mine)
        return [self._value(f"{self._exchanges}/{peer}", peer, label) for peer in range(self.size)]

    def _signature(self, key: str, text: bytes) -> bytes:
        """Proof that a rank has written `text`: anybody who reaches the store can write to it."""
        return hmac.digest(self._secret, f"{self._meeting} {key}".encode() + text, "sha256")

    def _value(self, key: str, peer: int, label: str) -> Any:
        found = self._get(key, peer, label)
        signature, text = found[:_SIGNATURE], found[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(key, text)):
            said = f"what the store holds of rank {self._members[peer]} was not written by a rank: it is not read"
            raise CollectiveError(self.rank, "exchange", label, said)
        return pickle.loads(text)

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank has called it.

        Raises:
            CollectiveError: if a rank has not come in time.
        """
        self.exchange(None, label=label)

    def leave(self) -> None:
        """Return when the others have read what they need, or after a moment: the store may be this process's."""
        self._seconds = min(self._seconds, _LEAVING_SECONDS)
        try:
            self.barrier(label="leave")
        except (CollectiveError, RuntimeError):
            # A process that has ended has read everything, or will read nothing.
            return

    def _get(self, key: str, peer: int, label: str) -> bytes:
        deadline = time.monotonic() + self._seconds
        while not self._store.check([key]):
            is_late = time.monotonic() >= deadline
            end = end_of_process(self._members[peer])
            # What a rank has said before its end counts.
            if (is_late or end) and not self._store.check([key]):
                late = (
                    f"has not come within {self._seconds:g} s: its process has ended, or it does not make this call; "
                    "make every rank catch its exception and call the same"
                )
                text = f"rank {self._members[peer]} {f'cannot come: {end}' if end else late}"
                raise CollectiveError(self.rank, "exchange", label, text)
            time.sleep(_LOOK_SECONDS)
        found: bytes = self._store.get(key)
        return found


def survivors_of(ranks: Collectives, error: BaseException | None, seconds: float) -> Survivors:
    """Meet the ranks that live after a failure; see `Survivors.of`."""
    return Survivors.of(ranks, error, seconds)


_MEETINGS: Final[collections.Counter[str]] = collections.Counter()
"""The number of times that the ranks of each group have met after a failure, by the group's name: so keys differ."""
