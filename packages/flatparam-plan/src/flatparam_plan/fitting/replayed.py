"""A rehearsed step replayed as if some units kept their parameters between the passes, without another rehearsal."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Sequence
from typing import Final, final

import attrs
import torch

from flatparam_plan.hardware.profile import Profile
from flatparam_plan.rehearsal import Rehearsal
from flatparam_plan.timeline import seconds_of_calls

_ALWAYS: Final = -1
"""The number of no unit: what happens whatever is kept."""
_NOTHING: Final = 1e-9
"""The part of a step by which two predictions differ that say the same."""


@final
@attrs.frozen
class Keeping:
    """The units that are kept, and what the replay says of that."""

    names: tuple[str, ...]
    seconds: float
    peak: int


@final
@attrs.define
class _Candidate:
    """A unit that is gathered again in a step; `number` is its place in the order of the first gathers."""

    name: str
    number: int
    intervals: list[tuple[int, int]] = attrs.field(factory=list)
    """The places in the log of memory between which it is freed, and would not be if it was kept."""
    nbytes: int = 0
    seconds: float = 0.0
    """The time that its other gathers take."""
    exposed: float = 0.0
    """The time that the stream that computes waits for them."""
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    """The same intervals, as places in the list of segments."""


@final
@attrs.define(eq=False)
class Replay:
    """The last step of a rehearsal, as pieces of time and of memory that add up.

    A unit that is kept after the forward pass leaves out every gather but its first, and its full parameters stay
    between. Everything else stays in its order. The runtime might gather something else ahead then, so a choice that
    is made here is to be rehearsed.
    """

    found: Rehearsal
    profile: Profile
    candidates: list[_Candidate] = attrs.field(init=False, factory=list)
    _events: list[tuple[int, int, int, float, float]] = attrs.field(init=False, factory=list)
    """(kind, unit, number, seconds, seconds since the host) for kernels 0, an issue 1 and a wait 2."""
    _segments: list[int] = attrs.field(init=False, factory=list)
    """The most bytes at once between neighbouring places at which a candidate is freed or gathered."""

    def __attrs_post_init__(self) -> None:
        self._read()
        self._cut()
        waits: dict[int, float] = {}
        self.seconds_with((), waits)
        for unit, seconds in waits.items():
            self.candidates[unit].exposed += seconds

    def _read(self) -> None:
        """Turn the entries of the last step into events."""
        found, profile = self.found, self.profile
        seconds_of_call = seconds_of_calls(profile, found)
        of_work = [profile.seconds_of(work) for work in found.works]
        # The root is a unit of its own, for which a policy chooses nothing.
        frees = {unit.name for unit in found.units[1:] if unit.frees_after_forward}
        known: dict[str, _Candidate] = {}
        freed_at: dict[str, tuple[int, int]] = {}
        calls: dict[int, tuple[int, int]] = {}
        before = ""
        for entry in found.entries:
            if entry.step != found.steps - 1 or entry.stage in ("building", "wrapping"):
                continue
            row = known.get(entry.unit)
            if entry.kind == "unshard" and entry.unit in frees:
                if row is None:
                    row = known[entry.unit] = _Candidate(entry.unit, len(known))
                elif entry.unit in freed_at:
                    # Memory is freed just before the event, and taken just after it.
                    place, row.nbytes = freed_at.pop(entry.unit)
                    row.intervals.append((place - 1, entry.place))
            elif entry.kind == "reshard" and row is not None:
                freed_at.setdefault(entry.unit, (entry.place, entry.nbytes))
            elif entry.kind == "kernels":
                numbers = found.kernels[entry.start : entry.stop]
                self._events.append((0, _ALWAYS, len(numbers), *self._laid([of_work[n] for n in numbers])))
            elif entry.kind == "issued" and entry.call is not None:
                seconds = seconds_of_call(entry.call)
                number = _ALWAYS
                if row is not None and row.intervals and entry.call.op == "all_gather":
                    number = row.number
                    row.seconds += seconds
                    if before == "kernels":
                        # It copies the shard, in its compute dtype, to where it is gathered from.
                        self._events[-1] = (0, number, *self._events[-1][2:])
                calls[id(entry.call)] = number, len(calls)
                self._events.append((1, *calls[id(entry.call)], seconds, 0.0))
            elif entry.kind == "waited" and id(entry.call) in calls:
                self._events.append((2, *calls[id(entry.call)], 0.0, 0.0))
            before = entry.kind
        self.candidates = list(known.values())

    def _laid(self, seconds: Sequence[float]) -> tuple[float, float]:
        """Return the time of kernels one after the other, and the time from the host's first launch to their end."""
        launch = self.profile.launch
        end = whole = 0.0
        for number, each in enumerate(seconds, start=1):
            end = max(end, number * launch) + each
            whole += each
        return whole, end

    def _cut(self) -> None:
        """Cut the memory of the step where a candidate is freed or gathered again."""
        log = self.found.log
        start = next(each.place for each in self.found.entries if each.step == self.found.steps - 1)
        places = {start, len(log.sizes)}
        for each in self.candidates:
            places.update(place for interval in each.intervals for place in interval)
        ordered = sorted(places)
        self._segments = [max(log.sizes[first:second]) for first, second in itertools.pairwise(ordered)]
        at = {place: number for number, place in enumerate(ordered)}
        for row in self.candidates:
            row.spans = [(at[first], at[second]) for first, second in row.intervals]

    def seconds_with(self, kept: Collection[int], waits: dict[int, float] | None = None) -> float:
        """Return the predicted time of the step if the candidates with these numbers are kept.

        Args:
            waits: takes the seconds for which the stream that computes waits for gathers, by unit.
        """
        host = compute = send = 0.0
        launch, shares_cores = self.profile.launch, self.profile.device == "cpu"
        ends: dict[int, float] = {}
        for kind, unit, number, seconds, from_host in self._events:
            if unit in kept:
                continue
            if kind == 0 and shares_cores:
                compute += seconds + number * launch
            elif kind == 0:
                compute = max(compute + seconds, host + from_host)
                host += number * launch
            elif kind == 1:
                host += launch
                if shares_cores:
                    compute += launch
                    ends[number] = seconds
                else:
                    send = max(send, compute, host) + seconds
                    ends[number] = send
            else:
                end = ends.pop(number, 0.0)
                after = compute + end if shares_cores else max(compute, end)
                if waits is not None and unit != _ALWAYS:
                    waits[unit] = waits.get(unit, 0.0) + after - compute
                compute = after
        return max(compute, send)

    def best(self, memory: int) -> Keeping | None:
        """Return the units to keep for the least time within `memory` bytes, no more than that takes; or `None`."""
        if max(self._segments) > memory:
            return None
        able = [each for each in self.candidates if each.nbytes]
        orders = [
            sorted(able, key=lambda each: (-each.exposed / each.nbytes, -each.number)),
            sorted(able, key=lambda each: (-each.seconds / each.nbytes, -each.number)),
        ]
        found = [self._least(self._filled(order, memory)) for order in orders]
        return min(found, key=lambda each: (each.seconds, each.peak))

    def _filled(self, order: Sequence[_Candidate], memory: int) -> list[int]:
        """Return the numbers of the units, in this order, that fit beside those before."""
        segments = torch.tensor(self._segments)
        taken: list[int] = []
        refused = memory + 1
        for each in order:
            if each.nbytes >= refused:
                continue
            spans = [segments[first:second] for first, second in each.spans if first < second]
            if all(int(span.max()) + each.nbytes <= memory for span in spans):
                taken.append(each.number)
                for span in spans:
                    span += each.nbytes
            else:
                refused = each.nbytes
        return taken

    def _least(self, taken: Sequence[int]) -> Keeping:
        """Return the fewest of the first units that reach the time of all: to leave out a gather never takes longer."""
        goal = self.seconds_with(set(taken)) * (1 + _NOTHING)
        count = bisect.bisect_left(
            range(len(taken)), True, key=lambda some: self.seconds_with(set(taken[:some])) <= goal
        )
        kept = set(taken[:count])
        segments = torch.tensor(self._segments)
        for each in self.candidates:
            if each.number in kept:
                for first, second in each.spans:
                    segments[first:second] += each.nbytes
        names = tuple(each.name for each in self.candidates if each.number in kept)
        return Keeping(names, self.seconds_with(kept), int(segments.max()))
