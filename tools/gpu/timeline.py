"""What a profile says of streams: how long each kind of work takes, and how much of it runs beside computing.

A profile is a trace in Chrome's format, as torch's profiler exports it for every vendor. Times are in microseconds.
"""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

Interval = tuple[float, float]
"""From a beginning to an end, which is not in it."""

STEP: Final = "the measured step"
"""The range in which the host makes the calls that are looked at."""

_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LIBRARY: Final = re.compile(r"^(nccl|rccl|oneccl|ccl_|hccl|cncl|msccl)", re.IGNORECASE)
"""Kernels of libraries for collectives."""
_RANGE: Final = re.compile(r"^(c10d::|nccl:|xccl:|record_param_comms)")
"""What surrounds the calls of those libraries on the host. Of one rank a collective is a copy, known by this alone."""


class Kind(enum.Enum):
    """What a stream does."""

    COMPUTING = "computing"
    COMMUNICATION = "communication"
    TO_DEVICE = "to the device"
    TO_HOST = "to the host"
    OTHER = "other"


@frozen
class Event:
    """Something with a beginning and an end. `lane` is the stream of the device, or the thread of the host."""

    name: str
    category: str
    begin: float
    end: float
    lane: tuple[Any, Any]
    correlation: int | None = None

    @property
    def interval(self) -> Interval:
        """When it was."""
        return self.begin, self.end

    @property
    def is_on_device(self) -> bool:
        """Whether a stream did it, and not the host."""
        return self.category in _ON_DEVICE


@frozen
class Hidden:
    """How long there was any work of a kind, and how long of that something was computed. Microseconds."""

    total: float
    hidden: float


@frozen
class Timeline:
    """A step, in microseconds.

    Attributes:
        length: from the first beginning to the last end on the device.
        computing: how long the stream that computes was busy with kernels.
        communication, to_device, to_host: collectives, and copies from and to the host.
        waits_of_host: how often the host stood still for the device, by the name of the call.
    """

    length: float
    computing: float
    communication: Hidden
    to_device: Hidden
    to_host: Hidden
    waits_of_host: dict[str, int]


def timeline(trace: Mapping[str, Any]) -> Timeline:
    """What a trace says of its step.

    Raises:
        LookupError: where the device did nothing in it, or it has no step.
    """
    events = events_of(trace)
    on_device = [event for event in events if event.is_on_device]
    if not on_device:
        raise LookupError(
            "expected a profile with events of the device, found none: torch cannot profile it here"
        )
    of_kind = _by_kind(events)
    computing = union(event.interval for event in _of_busiest_lane(of_kind[Kind.COMPUTING]))
    return Timeline(
        length=max(event.end for event in on_device) - min(event.begin for event in on_device),
        computing=length(computing),
        communication=_hidden(of_kind[Kind.COMMUNICATION], computing),
        to_device=_hidden(of_kind[Kind.TO_DEVICE], computing),
        to_host=_hidden(of_kind[Kind.TO_HOST], computing),
        waits_of_host=_waits_of_host(events),
    )


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """The events of a trace that take time."""
    found = []
    for each in trace["traceEvents"]:
        if each.get("ph") != "X":
            continue
        arguments = each.get("args", {})
        category, begin = each.get("cat", ""), float(each["ts"])
        lane = arguments.get("stream", each.get("tid")) if category in _ON_DEVICE else each.get("tid")
        end, correlation = begin + float(each.get("dur", 0.0)), arguments.get("correlation")
        found.append(Event(each["name"], category, begin, end, (each.get("pid"), lane), correlation))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as intervals that do not meet, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersection(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """The points that are in both; each is a `union`."""
    found, i, j = [], 0, 0
    while i < len(these) and j < len(those):
        begin, end = max(these[i][0], those[j][0]), min(these[i][1], those[j][1])
        if begin < end:
            found.append((begin, end))
        if these[i][1] < those[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of all together; they do not meet."""
    return sum(end - begin for begin, end in intervals)


def _hidden(events: Iterable[Event], computing: Sequence[Interval]) -> Hidden:
    busy = union(event.interval for event in events)
    return Hidden(length(busy), length(intersection(busy, computing)))


def _of_busiest_lane(events: Sequence[Event]) -> list[Event]:
    """Those of the stream that computes. Others have kernels too, which lay out what is sent, and hide nothing."""
    busy: dict[tuple[Any, Any], float] = collections.defaultdict(float)
    for event in events:
        busy[event.lane] += event.end - event.begin
    busiest = max(busy, key=lambda lane: busy[lane], default=None)
    return [event for event in events if event.lane == busiest]


def _by_kind(events: Sequence[Event]) -> dict[Kind, list[Event]]:
    launched_to_communicate = _launched_in_ranges(events)
    found: dict[Kind, list[Event]] = {kind: [] for kind in Kind}
    for event in events:
        if event.is_on_device:
            is_communication = _LIBRARY.match(event.name) or event.correlation in launched_to_communicate
            found[Kind.COMMUNICATION if is_communication else _kind_by_name(event)].append(event)
    return found


def _kind_by_name(event: Event) -> Kind:
    if event.category == "kernel":
        return Kind.COMPUTING
    direction = re.sub(r"[^a-z0-9]", "", event.name.lower())
    if "htod" in direction or "h2d" in direction:
        return Kind.TO_DEVICE
    return Kind.TO_HOST if "dtoh" in direction or "d2h" in direction else Kind.OTHER


def _launched_in_ranges(events: Sequence[Event]) -> set[int]:
    """The correlations of what the host launched while it called a library for collectives."""
    ranges: dict[tuple[Any, Any], list[Interval]] = collections.defaultdict(list)
    for event in events:
        if not event.is_on_device and _RANGE.match(event.name):
            ranges[event.lane].append(event.interval)
    merged = {lane: union(intervals) for lane, intervals in ranges.items()}
    return {
        event.correlation
        for event in events
        if event.correlation is not None and not event.is_on_device
        if any(begin <= event.begin < end for begin, end in merged.get(event.lane, ()))
    }


def _waits_of_host(events: Sequence[Event]) -> dict[str, int]:
    steps = [event for event in events if event.name == STEP and event.category == "user_annotation"]
    if not steps:
        raise LookupError(f"expected a range named {STEP!r} in the profile, found none")
    begin, end = steps[0].interval
    waits = collections.Counter(
        event.name
        for event in events
        if event.category.endswith(("_runtime", "_driver")) and "Synchronize" in event.name
        if begin <= event.begin < end
    )
    return dict(sorted(waits.items()))
