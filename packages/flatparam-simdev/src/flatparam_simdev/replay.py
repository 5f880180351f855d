"""Replay a log on a device whose streams run by themselves: how long it takes, and what is hidden behind computing.

Each stream is a lane that does one thing after the other. Something of a stream begins when the stream has done what
was queued on it before, when the events that the stream waits for are over, and when the host has queued it. The host
needs a time for each call, and stands still where it synchronises. What each thing costs is assumed, not measured; the
order of everything is the program's own.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final

import attrs

from flatparam_simdev.log import Kind, Record

Cost = Callable[[Record], float]
"""How long something of a stream takes."""

_PRODUCTS: Final = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_GATHERS: Final = ("all_gather", "copy to the device")
_REDUCTIONS: Final = ("reduce_scatter", "all_reduce", "copy to the host")


@attrs.frozen
class Costs:
    """Costs by kind.

    Attributes:
        product: of a matrix product.
        communication: of a collective, and of a copy between the host and the device.
        kernel: of any other kernel.
        message: of communication that is of no more than `message_nbytes`.
    """

    product: float = 100.0
    communication: float = 100.0
    kernel: float = 0.5
    message: float = 1.0
    message_nbytes: int = 256

    def __call__(self, record: Record) -> float:
        """Return how long something of a stream takes."""
        if record.kind is Kind.KERNEL:
            return self.product if record.name.startswith(_PRODUCTS) else self.kernel
        return self.message if record.extra <= self.message_nbytes else self.communication


def from_table(costs: Mapping[str, float], otherwise: float) -> Cost:
    """Return costs by the names of operators and collectives."""
    return lambda record: costs.get(record.name, otherwise)


@attrs.frozen
class Task:
    """Something that a stream does, and when."""

    record: Record
    phase: str
    begin: float
    end: float

    @property
    def cost(self) -> float:
        """Return how long it takes."""
        return self.end - self.begin

    @property
    def computes(self) -> bool:
        """Return whether it is a kernel, and not communication."""
        return self.record.kind is Kind.KERNEL


@attrs.frozen
class HostWait:
    """A time in which the host stands still."""

    name: str
    phase: str
    begin: float
    end: float


@attrs.frozen
class Communication:
    """The time that communication takes, and how much of it is hidden: something is computed meanwhile."""

    total: float
    hidden: float


@attrs.frozen
class Step:
    """The figures of one step.

    Attributes:
        length: from the end of the step before it to its own end.
        lower_bound: the longer of all computing and all communication (that of the lane which has most of it), plus the
            first gather and the last reduction, which nothing can hide.
        computing: all of it.
        communication: of each phase.
        waits_of_host: how often the host stands still in each phase.
        kernels: how many are started in each phase.
        peak_nbytes: the most memory of the device at once.
        peak_of_pools_nbytes: the sum of the most memory of each stream's pool, none of which lends to another.
    """

    length: float
    lower_bound: float
    computing: float
    communication: dict[str, Communication]
    waits_of_host: dict[str, int]
    kernels: dict[str, int]
    peak_nbytes: int
    peak_of_pools_nbytes: int

    def communication_in(self, word: str) -> Communication:
        """Return that of all phases whose names have this word."""
        chosen = [each for phase, each in self.communication.items() if word in phase.split()]
        return Communication(sum(each.total for each in chosen), sum(each.hidden for each in chosen))


@attrs.define(eq=False)
class _Memory:
    """The memory that the caching allocator holds, pool by pool, as the host goes on."""

    pools: collections.Counter[int] = attrs.field(factory=collections.Counter)
    sizes: dict[int, int] = attrs.field(factory=dict)
    recorded: dict[int, set[int]] = attrs.field(factory=dict)
    waiting: list[tuple[float, int, int]] = attrs.field(factory=list)
    """Freed, but a stream that was recorded may still be at it: until when, the pool, and the bytes."""

    def allocate(self, record: Record, now: float) -> None:
        while self.waiting and self.waiting[0][0] <= now:
            _, pool, nbytes = heapq.heappop(self.waiting)
            self.pools[pool] -= nbytes
        self.sizes[record.subject] = record.extra
        self.pools[record.stream] += record.extra

    def free(self, record: Record, now: float, lanes: Mapping[int, float]) -> None:
        nbytes = self.sizes.pop(record.subject, 0)  # nothing where it is older than the log
        streams = self.recorded.pop(record.subject, set())
        until = max((lanes.get(stream, 0.0) for stream in streams), default=now)
        if until > now:
            heapq.heappush(self.waiting, (until, record.stream, nbytes))
        else:
            self.pools[record.stream] -= nbytes


@attrs.define(eq=False)
class Replay:
    """A schedule."""

    tasks: list[Task] = attrs.field(factory=list)
    waits: list[HostWait] = attrs.field(factory=list)
    memory: list[tuple[str, dict[int, int]]] = attrs.field(factory=list)
    """After each allocation: the phase, and the bytes of each pool."""

    def step(self, name: str) -> Step:
        """Return the sums of the phases whose names begin so ("step 2")."""
        tasks = [task for task in self.tasks if task.phase.startswith(name)]
        phases = list(dict.fromkeys(task.phase for task in tasks))
        before = [task.end for task in self.tasks[: self.tasks.index(tasks[0])]]
        computed = _union((task.begin, task.end) for task in self.tasks if task.computes)
        pools = [pools for phase, pools in self.memory if phase.startswith(name)]
        return Step(
            length=max(task.end for task in tasks) - max(before, default=0.0),
            lower_bound=_lower_bound(tasks),
            computing=sum(task.cost for task in tasks if task.computes),
            communication={phase: _communication(tasks, phase, computed) for phase in phases},
            waits_of_host=dict(collections.Counter(w.phase for w in self.waits if w.phase.startswith(name))),
            kernels={phase: sum(t.computes for t in tasks if t.phase == phase) for phase in phases},
            peak_nbytes=max((sum(each.values()) for each in pools), default=0),
            peak_of_pools_nbytes=_sum_of_peaks(pools),
        )


def replay(log: Iterable[Record], cost: Cost, *, host_call: float = 0.0) -> Replay:
    """Schedule a log; `host_call` is what the host needs to queue one thing."""
    done = Replay()
    lanes: collections.defaultdict[int, float] = collections.defaultdict(float)
    events: dict[tuple[int, int], float] = {}
    memory = _Memory()
    now, phase = 0.0, "the beginning"
    for record in log:
        event = (record.subject, record.extra)
        if record.kind.runs_on_device:
            now += host_call
            begin = max(lanes[record.stream], now)
            lanes[record.stream] = begin + cost(record)
            done.tasks.append(Task(record, phase, begin, lanes[record.stream]))
        elif record.kind is Kind.RECORD:
            events[event] = max(lanes[record.stream], now)
        elif record.kind is Kind.WAIT:
            lanes[record.stream] = max(lanes[record.stream], events.get(event, 0.0))
        elif record.kind.is_wait_of_host:
            until = max(now, _awaited(record, lanes, events))
            done.waits.append(HostWait(record.name, phase, now, until))
            now = until
        elif record.kind is Kind.MARK:
            phase = record.name
        elif record.kind is Kind.RECORD_STREAM:
            memory.recorded.setdefault(record.subject, set()).add(record.stream)
        elif record.kind is Kind.ALLOCATE and record.name == "device":
            memory.allocate(record, now)
            done.memory.append((phase, dict(memory.pools)))
        elif record.kind is Kind.FREE and record.name == "device":
            memory.free(record, now, lanes)
    return done


def _awaited(record: Record, lanes: Mapping[int, float], events: Mapping[tuple[int, int], float]) -> float:
    if record.kind is Kind.SYNC_DEVICE:
        return max(lanes.values(), default=0.0)
    if record.kind is Kind.SYNC_EVENT:
        return events.get((record.subject, record.extra), 0.0)
    return lanes.get(record.stream, 0.0)


def _communication(tasks: Iterable[Task], phase: str, computed: Sequence[tuple[float, float]]) -> Communication:
    """Return that of a phase, of which is hidden what overlaps with the intervals in which something is computed."""
    own = [task for task in tasks if task.phase == phase and not task.computes]
    hidden = 0.0
    for task in own:
        hidden += sum(max(0.0, min(task.end, end) - max(task.begin, begin)) for begin, end in computed)
    return Communication(sum(task.cost for task in own), hidden)


def _lower_bound(tasks: Sequence[Task]) -> float:
    lanes: dict[int, float] = collections.defaultdict(float)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    largest = max((task.cost for task in tasks if not task.computes), default=0.0)
    for task in tasks:
        if task.computes:
            continue
        lanes[task.record.stream] += task.cost
        if task.cost == largest and task.record.name in _GATHERS:
            first.setdefault(task.record.name, task.cost)
        elif task.cost == largest and task.record.name in _REDUCTIONS:
            last[task.record.name] = task.cost
    computing = sum(task.cost for task in tasks if task.computes)
    return max(computing, *lanes.values(), 0.0) + sum(first.values()) + sum(last.values())


def _sum_of_peaks(pools: Iterable[Mapping[int, int]]) -> int:
    peaks: dict[int, int] = {}
    for each in pools:
        for pool, nbytes in each.items():
            peaks[pool] = max(peaks.get(pool, 0), nbytes)
    return sum(peaks.values())


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same points as intervals that do not meet, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


# Pictures

_COLOURS: Final = {
    "all_gather": "#4c8bc0",
    "reduce_scatter": "#d08a3c",
    "all_reduce": "#b65b4f",
    "copy to the device": "#7a6bb0",
    "copy to the host": "#a0608f",
    "computing": "#6aa66a",
    "other": "#b0b0b0",
    "the host waits": "#333333",
}
_WIDTH: Final = 1200.0
_LEFT: Final = 190.0
_LANE: Final = 26.0
_TOP: Final = 54.0


def draw(schedule: Replay, step: str, title: str, *, least: float = 0.0) -> str:
    """Return a picture of a step as the text of an SVG: a lane per stream, and one for when the host stands still.

    What would be narrower than `least` points is left out.
    """
    tasks = [task for task in schedule.tasks if task.phase.startswith(step) and task.cost > 0]
    waits = [wait for wait in schedule.waits if wait.phase.startswith(step) and wait.end > wait.begin]
    start, stop = min(task.begin for task in tasks), max(task.end for task in tasks)
    streams = sorted({task.record.stream for task in tasks})
    scale = (_WIDTH - _LEFT - 10) / (stop - start)
    rows = {stream: _TOP + 20 + row * _LANE for row, stream in enumerate(streams)}
    host = _TOP + 20 + len(streams) * _LANE

    def box(begin: float, end: float, y: float, colour: str, text: str) -> str:
        shape = f'x="{_LEFT + (begin - start) * scale:.1f}" y="{y:.1f}" width="{max((end - begin) * scale, 0.4):.2f}"'
        told = f"<title>{escape(text)}: {begin - start:.0f} to {end - start:.0f}</title>"
        return f'<rect {shape} height="{_LANE - 6:.0f}" fill="{colour}">{told}</rect>'

    parts = [_text(10, 20, title, 15), *_legend()]
    for phase in dict.fromkeys(task.phase for task in tasks):
        x = _LEFT + (min(task.begin for task in tasks if task.phase == phase) - start) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{host + _LANE}" stroke="#999"/>')
        parts.append(_text(x + 3, _TOP + 10, phase.removeprefix(step).strip(), 10))
    for stream, y in rows.items():
        parts.append(_text(10, y + 14, f"stream {stream}: {_busy_with(tasks, stream)}", 11))
    parts.append(_text(10, host + 14, "the host waits", 11))
    for task in tasks:
        if task.cost * scale < least:
            continue
        text = f"{task.record.name}, {task.phase}"
        parts.append(box(task.begin, task.end, rows[task.record.stream], _COLOURS[_colour_of(task)], text))
    parts += [box(max(w.begin, start), w.end, host, _COLOURS["the host waits"], w.name) for w in waits if w.end > start]
    size = f'width="{_WIDTH:.0f}" height="{host + _LANE + 8:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _colour_of(task: Task) -> str:
    if task.computes:
        return "computing" if task.record.name.startswith(_PRODUCTS) else "other"
    return task.record.name if task.record.name in _COLOURS else "other"


def _busy_with(tasks: Iterable[Task], stream: int) -> str:
    """Return the word for what a lane is for."""
    costs: dict[str, float] = collections.defaultdict(float)
    for task in tasks:
        if task.record.stream == stream:
            costs["computing" if task.computes else task.record.name] += task.cost
    return max(costs, key=lambda name: costs[name])


def _legend() -> list[str]:
    parts = []
    for number, (name, colour) in enumerate(_COLOURS.items()):
        x = 10.0 + 146 * number
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 16, 42, name, 11))
    return parts


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
