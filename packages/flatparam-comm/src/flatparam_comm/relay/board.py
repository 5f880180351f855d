"""The keys that the relays of a group's ranks share in the group's store.

======================  ===========================================  ==================================================
key                     written by                                   value
======================  ===========================================  ==================================================
`present`               every rank: one more, at its end one less    a count; the last rank deletes it and the log
`rank/R`                rank R                                       its `Presence`, deleted when it leaves
`beat/R`                rank R, if other hosts take part             a count that grows, deleted when R leaves
`log/0`, `log/1`, ...   any rank, the first that sets it             a `FailureReport`
======================  ===========================================  ==================================================

No call of the store waits for a key: what is not there yet is looked for again at the next tick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, final

import attrs

from flatparam_comm.relay.failure import FailureReport

__all__ = ["Board", "Presence"]


@final
@attrs.frozen
class Presence:
    """The process of a rank, as the other ranks have to know it."""

    incarnation: str
    pid: int
    start: str
    host: tuple[str, ...]


@final
@attrs.define(eq=False)
class Board:
    """The shared keys, as one rank reads and writes them. Every method may raise what the store raises."""

    store: Any
    rank: int
    read: int = 0
    """The number of entries of the log that were read."""
    beats: int = 0

    def enter(self, presence: Presence) -> None:
        """Tell the others of this rank's process."""
        self.store.add("present", 1)
        self.store.set(f"rank/{self.rank}", json.dumps(attrs.asdict(presence)))

    def presences(self, ranks: Iterable[int]) -> Iterator[tuple[int, Presence]]:
        """The processes of those of `ranks` that have told of theirs."""
        for rank in ranks:
            key = f"rank/{rank}"
            if self.store.check([key]):
                told = json.loads(self.store.get(key))
                yield rank, Presence(told["incarnation"], told["pid"], told["start"], tuple(told["host"]))

    def publish(self, failure: FailureReport) -> None:
        """Append a failure to the log."""
        data = failure.to_bytes().decode()
        number = self.read
        while self.store.compare_set(f"log/{number}", "", data) != data.encode():
            number += 1

    def news(self) -> Iterator[FailureReport]:
        """The failures that were appended to the log since the last call."""
        while self.store.check([f"log/{self.read}"]):
            yield FailureReport.from_bytes(self.store.get(f"log/{self.read}"))
            self.read += 1

    def beat(self) -> None:
        """Tell the others that this rank's process runs."""
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))

    def beat_of(self, rank: int) -> bytes:
        """The last beat of `rank`; empty if there is none."""
        key = f"beat/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def leave(self) -> None:
        """Delete this rank's keys; the last rank deletes the rest."""
        for key in (f"rank/{self.rank}", f"beat/{self.rank}"):
            self.store.delete_key(key)
        if self.store.add("present", -1) <= 0:
            number = 0
            while self.store.delete_key(f"log/{number}"):
                number += 1
            self.store.delete_key("present")

    def others_are_present(self) -> bool:
        """Whether ranks that have entered have not left; call it only after `leave`."""
        return bool(self.store.check(["present"]))
