"""Replay a log on a device that computes one kernel at a time, whatever streams they are on, and serves some sooner.

A long kernel runs wave after wave. After each wave the device goes on with the kernel of the highest priority that is
ready, and of several with the one that has been ready for longest; so a kernel of a stream with a high priority comes
between two waves, and another one after the last. What follows something of another stream is ready a little later than
what follows something of its own. Communication begins as soon as it is ready. The host is ahead of all of it: it has
queued everything before the first kernel runs.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable

import attrs

from flatparam_simdev.log import Kind, Record
from flatparam_simdev.replay import Cost, Replay, Task


@attrs.define(eq=False)
class _Queued:
    """Something that a stream has to do."""

    record: Record
    phase: str
    left: float
    """How long it still takes."""
    awaited: int
    """How many others it still waits for."""
    priority: int
    may_begin: float = 0.0
    """When it is ready, as far as is known."""
    waiting: list[int] = attrs.field(factory=list)
    """The places in the queue of those that wait for it."""
    begin: float = -1.0
    end: float = -1.0


@attrs.define(eq=False)
class _Device:
    queue: list[_Queued]
    wave: float
    latency: float
    now: float = 0.0
    running: int = -1
    ready: list[tuple[int, float, int]] = attrs.field(factory=list)
    """Kernels: their priority, since when they are ready, and which."""
    soon: list[tuple[float, bool, int]] = attrs.field(factory=list)
    """When something is over (or, of a kernel, a wave of it), or will be ready, and which."""

    def run(self) -> None:
        for number, each in enumerate(self.queue):
            if not each.awaited:
                self._let(number)
        while self.ready or self.soon:
            if self.running < 0 and self.ready:
                self._start(heapq.heappop(self.ready)[-1])
            self.now, is_over, number = heapq.heappop(self.soon)
            if is_over:
                self._end(number)
            else:
                self._let(number)

    def _let(self, number: int) -> None:
        """Let it run."""
        operation = self.queue[number]
        if operation.record.kind is Kind.KERNEL:
            heapq.heappush(self.ready, (operation.priority, self.now, number))
            return
        operation.begin = self.now
        heapq.heappush(self.soon, (self.now + operation.left, True, number))
        operation.left = 0.0

    def _start(self, number: int) -> None:
        """Run a wave of a kernel."""
        operation = self.queue[number]
        if operation.begin < 0:
            operation.begin = self.now
        takes = min(self.wave, operation.left)
        operation.left -= takes
        heapq.heappush(self.soon, (self.now + takes, True, number))
        self.running = number

    def _end(self, number: int) -> None:
        operation = self.queue[number]
        if number == self.running:
            self.running = -1
        if operation.left > 0:
            # It has been ready for longest of all with its priority, or it would not have run.
            heapq.heappush(self.ready, (operation.priority, operation.begin, number))
            return
        operation.end = self.now
        for other in operation.waiting:
            follower = self.queue[other]
            crosses = follower.record.stream != operation.record.stream
            follower.may_begin = max(follower.may_begin, self.now + (self.latency if crosses else 0))
            follower.awaited -= 1
            if not follower.awaited:
                heapq.heappush(self.soon, (follower.may_begin, False, other))


def contended(log: Iterable[Record], cost: Cost, *, wave: float, latency: float) -> Replay:
    """Schedule a log.

    Args:
        log: what has happened.
        cost: what each thing takes.
        wave: what a wave of a kernel takes.
        latency: how much later something is ready that has waited for another stream.
    """
    queue = _queue(log, cost)
    _Device(queue, wave, latency).run()
    return Replay([Task(each.record, each.phase, each.begin, each.end) for each in queue])


def _queue(log: Iterable[Record], cost: Cost) -> list[_Queued]:
    """Return what the streams have to do, in the order in which the host has queued it, and what each waits for."""
    queue: list[_Queued] = []
    before: collections.defaultdict[int, set[int]] = collections.defaultdict(set)  # for each stream
    events: dict[tuple[int, int], set[int]] = {}
    priorities: dict[int, int] = {}
    phase = "the beginning"
    for record in log:
        event, stream = (record.subject, record.extra), record.stream
        if record.kind is Kind.PRIORITY:
            priorities[stream] = record.extra
        elif record.kind is Kind.MARK:
            phase = record.name
        elif record.kind is Kind.RECORD:
            events[event] = set(before[stream])
        elif record.kind is Kind.WAIT:
            before[stream] |= events.get(event, set())
        elif record.kind.runs_on_device:
            awaited = before[stream]
            for each in awaited:
                queue[each].waiting.append(len(queue))
            before[stream] = {len(queue)}
            priority = priorities.get(stream, 0)
            queue.append(_Queued(record, phase, cost(record), len(awaited), priority))
    return queue
