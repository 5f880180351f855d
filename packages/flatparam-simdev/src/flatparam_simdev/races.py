"""Find in a log what a device whose streams run by themselves could do in another order.

Streams and the host are *agents*. Each has a vector clock: of every agent, how many of its operations are known to be
over when this one does its next. An operation of a stream happens after what the stream has done before, after the
events that the stream has waited for, and after what the host has done before it queued it. The host happens after an
operation of the device only where it has synchronised with it. All threads of the process count as one host.

Two accesses to the same bytes, one of them a write, that neither clock orders are a *race*.

A caching allocator gives out freed memory again at once, without asking whether the device is done with it: for memory
of the pool of stream S it only waits for the streams that `record_stream` has named. Which block it gives out again is
not known, so any block of the pool that is allocated later may be the one: what is done with it first must happen
after everything that was done with the freed one. Pinned memory is different, since its allocator waits for the copies.

The method is that of Lamport and of Fidge and Mattern, as data race detectors such as ThreadSanitizer use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

import attrs

from flatparam_simdev.log import HOST, Access, Kind, Record

Clock = dict[int, int]


@attrs.frozen
class Use:
    """An access, and when: the ``tick`` of its agent."""

    agent: int
    tick: int
    name: str
    writes: bool
    phase: str
    number: int

    def __str__(self) -> str:
        who = "the host" if self.agent == HOST else f"stream {self.agent}"
        return f"{self.name} ({'writes' if self.writes else 'reads'}, {who}, {self.phase}, record {self.number})"

    def is_before(self, clock: Mapping[int, int]) -> bool:
        """Return whether whoever has this clock comes after it."""
        return clock.get(self.agent, 0) >= self.tick


@attrs.frozen
class Finding:
    """Something that may go wrong.

    Attributes:
        rule: "race", "used after it was freed" or "reused too early".
        memory: "device" or "pinned".
        earlier: the use that the later one does not wait for.
        times: how often the same two operators do it in the same phase.
    """

    rule: str
    memory: str
    earlier: Use
    later: Use
    times: int = 1

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        if self.rule == "race":
            return f"race over {self.memory} memory: {self.later} does not wait for {self.earlier}{often}"
        if self.rule == "reused too early":
            return (
                f"{self.memory} memory reused too early: {self.later} may be given the memory that {self.earlier} "
                f"still works on{often}"
            )
        return f"{self.memory} memory used after it was freed: {self.later}{often}"

    @property
    def kind(self) -> tuple[str, ...]:
        """Return what findings have in common of which one is reported."""
        one, two = self.earlier, self.later
        return (self.rule, self.memory, one.name, str(one.agent), two.name, str(two.agent), two.phase)


@attrs.define(eq=False)
class _Block:
    memory: str = "device"
    pool: int = 0
    uses: dict[tuple[int, int, int, bool], Use] = attrs.field(factory=dict)
    recorded: set[int] = attrs.field(factory=set)
    freed: bool = False
    before: dict[int, Use] = attrs.field(factory=dict)
    """The last use by each agent of the memory that this may be."""
    users: set[int] = attrs.field(factory=set)
    """The agents that have used it; each must have come after all in `before`."""


@final
class Checker:
    """Reads a log from its beginning to its end."""

    def __init__(self) -> None:
        """Begin with no streams, no events and no memory."""
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._events: dict[tuple[int, int], Clock] = {}
        self._blocks: dict[int, _Block] = {}
        self._freed: dict[int, dict[int, Use]] = {}
        self._found: dict[tuple[str, ...], Finding] = {}
        self._phase = "the beginning"
        self._number = 0

    @property
    def findings(self) -> list[Finding]:
        """Return what was found so far."""
        return list(self._found.values())

    def read(self, record: Record) -> None:
        """Take the next record."""
        handler = _HANDLERS[record.kind]
        handler(self, record)
        self._number += 1

    # Time

    def _clock(self, agent: int) -> Clock:
        return self._clocks.setdefault(agent, {})

    def _record(self, record: Record) -> None:
        clock = dict(self._clock(record.stream))
        _join(clock, self._clocks[HOST])
        self._events[record.subject, record.extra] = clock

    def _wait(self, record: Record) -> None:
        _join(self._clock(record.stream), self._event(record))

    def _synchronise_stream(self, record: Record) -> None:
        _join(self._clocks[HOST], self._clock(record.stream))

    def _synchronise_event(self, record: Record) -> None:
        _join(self._clocks[HOST], self._event(record))

    def _query(self, record: Record) -> None:
        (self._synchronise_event if record.subject else self._synchronise_stream)(record)

    def _synchronise_device(self, record: Record) -> None:
        for agent in list(self._clocks):
            _join(self._clocks[HOST], self._clocks[agent])

    def _event(self, record: Record) -> Clock:
        """Return what an event is after; nothing where it was recorded before the log began."""
        return self._events.get((record.subject, record.extra), {})

    def _ignore(self, record: Record) -> None:
        """Do nothing: a priority orders nothing."""

    def _mark(self, record: Record) -> None:
        self._phase = record.name

    # Memory

    def _block(self, number: int) -> _Block:
        return self._blocks.setdefault(number, _Block())

    def _allocate(self, record: Record) -> None:
        before = dict(self._freed.get(record.stream, {})) if record.name == "device" else {}
        self._blocks[record.subject] = _Block(record.name, record.stream, before=before)

    def _record_stream(self, record: Record) -> None:
        self._block(record.subject).recorded.add(record.stream)

    def _free(self, record: Record) -> None:
        block = self._block(record.subject)
        block.freed = True
        if record.name == "device":
            known = dict(self._clocks[HOST])
            for stream in block.recorded:
                _join(known, self._clock(stream))
            pool = self._freed.setdefault(record.stream, {})
            for use in block.uses.values():
                if not use.is_before(known):
                    _keep_later(pool, use)
        block.uses = {}

    def _access(self, record: Record) -> None:
        agent = HOST if record.kind is Kind.HOST_ACCESS else record.stream
        clock = self._clock(agent)
        if agent != HOST:
            _join(clock, self._clocks[HOST])
        clock[agent] = clock.get(agent, 0) + 1
        for access in record.accesses:
            use = Use(agent, clock[agent], record.name, access.writes, self._phase, self._number)
            self._check(self._block(access.block), access, use, clock)

    def _check(self, block: _Block, access: Access, use: Use, clock: Clock) -> None:
        if block.freed:
            self._find("used after it was freed", block, use, use)
        if use.agent not in block.users:
            block.users.add(use.agent)
            for earlier in block.before.values():
                if not earlier.is_before(clock):
                    self._find("reused too early", block, earlier, use)
        for (_, begin, end, writes), earlier in block.uses.items():
            meets = begin < access.end and access.begin < end
            if meets and (writes or use.writes) and not earlier.is_before(clock):
                self._find("race", block, earlier, use)
        block.uses[use.agent, access.begin, access.end, access.writes] = use

    def _find(self, rule: str, block: _Block, earlier: Use, later: Use) -> None:
        finding = Finding(rule, block.memory, earlier, later)
        known = self._found.get(finding.kind)
        self._found[finding.kind] = attrs.evolve(known, times=known.times + 1) if known else finding


_HANDLERS: Final = {
    Kind.KERNEL: Checker._access,
    Kind.COLLECTIVE: Checker._access,
    Kind.TO_HOST: Checker._access,
    Kind.TO_DEVICE: Checker._access,
    Kind.HOST_ACCESS: Checker._access,
    Kind.ALLOCATE: Checker._allocate,
    Kind.FREE: Checker._free,
    Kind.RECORD: Checker._record,
    Kind.WAIT: Checker._wait,
    Kind.SYNC_STREAM: Checker._synchronise_stream,
    Kind.SYNC_EVENT: Checker._synchronise_event,
    Kind.SYNC_DEVICE: Checker._synchronise_device,
    Kind.QUERY: Checker._query,
    Kind.RECORD_STREAM: Checker._record_stream,
    Kind.MARK: Checker._mark,
    Kind.PRIORITY: Checker._ignore,
}


def find_races(log: Iterable[Record]) -> list[Finding]:
    """Return all findings in a log, each kind once, in the order in which they were found."""
    checker = Checker()
    for record in log:
        checker.read(record)
    return checker.findings


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for agent, tick in other.items():
        if clock.get(agent, 0) < tick:
            clock[agent] = tick


def _keep_later(uses: dict[int, Use], use: Use) -> None:
    """Keep of each agent the last use alone: whoever is after that is after all of the agent's."""
    known = uses.get(use.agent)
    if known is None or known.tick < use.tick:
        uses[use.agent] = use
