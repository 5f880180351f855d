"""Write a log by hand, for the tests of those who read one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs

from flatparam_simdev.log import HOST, Access, Kind, Record

NBYTES = 100


@attrs.define(eq=False)
class Writer:
    """What each method says has happened next. Blocks are numbers, and have a hundred bytes."""

    records: list[Record] = attrs.field(factory=list)
    _numbers: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1))

    def _add(self, record: Record) -> None:
        self.records.append(record)

    def prioritise(self, stream: int, priority: int) -> None:
        """A stream has a priority."""
        self._add(Record(Kind.PRIORITY, stream, extra=priority))

    def mark(self, name: str) -> None:
        """A phase begins."""
        self._add(Record(Kind.MARK, 0, name))

    def allocate(self, *, pool: int = 0, pinned: bool = False) -> int:
        """A new block; returns it."""
        block = next(self._numbers)
        self._add(Record(Kind.ALLOCATE, pool, "pinned" if pinned else "device", (), block, NBYTES))
        return block

    def free(self, block: int, *, pool: int = 0, pinned: bool = False) -> None:
        """A block is given back to its pool."""
        self._add(Record(Kind.FREE, pool, "pinned" if pinned else "device", (), block, NBYTES))

    def use(
        self,
        kind: Kind,
        stream: int,
        name: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        extent: tuple[int, int] = (0, NBYTES),
    ) -> None:
        """Something reads and writes blocks, or a part of them."""
        accesses = [Access(block, *extent, False) for block in reads]
        accesses += [Access(block, *extent, True) for block in writes]
        self._add(Record(kind, stream, name, tuple(accesses), 0, NBYTES))

    def kernel(self, stream: int, name: str, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """A stream runs a kernel."""
        self.use(Kind.KERNEL, stream, name, reads=reads, writes=writes)

    def host(self, name: str, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """The host looks at pinned memory."""
        self.use(Kind.HOST_ACCESS, HOST, name, reads=reads, writes=writes)

    def record(self, stream: int) -> int:
        """A new event on a stream; returns it."""
        event = next(self._numbers)
        self._add(Record(Kind.RECORD, stream, "", (), event, 1))
        return event

    def wait(self, stream: int, event: int) -> None:
        """A stream waits for an event."""
        self._add(Record(Kind.WAIT, stream, "", (), event, 1))

    def order(self, earlier: int, later: int) -> None:
        """A stream waits for what another has done so far."""
        self.wait(later, self.record(earlier))

    def synchronise(self, stream: int) -> None:
        """The host waits for a stream."""
        self._add(Record(Kind.SYNC_STREAM, stream, "synchronize"))

    def synchronise_event(self, event: int) -> None:
        """The host waits for an event."""
        self._add(Record(Kind.SYNC_EVENT, HOST, "synchronize", (), event, 1))

    def synchronise_device(self) -> None:
        """The host waits for everything."""
        self._add(Record(Kind.SYNC_DEVICE, 0, "synchronize"))

    def query(self, event: int) -> None:
        """The host asks for an event, and it is over."""
        self._add(Record(Kind.QUERY, HOST, "query", (), event, 1))

    def record_stream(self, block: int, stream: int) -> None:
        """The allocator is told that a stream uses a block."""
        self._add(Record(Kind.RECORD_STREAM, stream, "", (), block))
