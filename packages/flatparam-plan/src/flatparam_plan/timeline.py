"""The predicted time of a step: the schedule of the runtime, as it was rehearsed, laid on a timeline of streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, final

import attrs

from flatparam_comm import sent_nbytes
from flatparam_plan.hardware.profile import AnyProfile, Profile, profile_named
from flatparam_plan.hardware.stretches import Stretches, Timings
from flatparam_plan.picture import (
    COMMUNICATION,
    COMPUTING,
    PHASE,
    WAITING,
    Curve,
    Picture,
    Piece,
    columns,
    shown_seconds,
)
from flatparam_plan.rehearsal import Entry, Rehearsal
from flatparam_plan.training import Call

_ERROR: Final = (
    "ten of twelve such predictions were within 10 % of the median, "
    "the others 11 % below and 20 % above (docs/plans.md)"
)
"""The errors that `nox -s run -- plan times` has measured."""


@final
@attrs.frozen(eq=False)
class Prediction:
    """The time of a step and its parts, in seconds, under a hardware profile."""

    profile: Profile
    seconds: float
    parts: dict[str, float]
    """The stages' times on the stream that computes."""
    computing: float
    communication: float
    """The time in which something is sent."""
    exposed: float
    """The time in which the stream that computes waits for what is sent."""
    host: float
    """The time in which the stream that computes waits for the host."""
    flops: int
    pieces: tuple[Piece, ...] = attrs.field(repr=False)
    curve: Curve = attrs.field(repr=False)
    timings: Timings | None = attrs.field(default=None, repr=False)
    """The times of steps with few blocks that it is laid out from, if it is not from the profile's numbers."""

    @property
    def is_measured(self) -> bool:
        """Whether it is laid out from times of steps with few blocks, and not from the profile's numbers."""
        return self.timings is not None

    @property
    def bound_by(self) -> str:
        """The bound of the step: the kind of work that takes most of it."""
        found = {"computing": self.computing, "communication": self.exposed, "the host": self.host}
        return max(found, key=lambda name: found[name])

    def lines(self) -> list[str]:
        """Return the prediction as text."""
        rate = self.flops / self.seconds if self.seconds else 0.0
        rows = [[f"predicted step, {self.profile.name}", shown_seconds(self.seconds)]]
        rows += [[f"  {stage}", shown_seconds(seconds)] for stage, seconds in self.parts.items()]
        rows += [
            ["computing", shown_seconds(self.computing)],
            ["communication", shown_seconds(self.communication)],
            ["  of it exposed", shown_seconds(self.exposed)],
            ["waiting for the host", shown_seconds(self.host)],
        ]
        return [*columns(rows), f"bound by {self.bound_by}; {rate / 1e12:.3g} TFLOP/s on each rank", self.certainty]

    @property
    def certainty(self) -> str:
        """The source of the prediction and its known error, as one line."""
        return f"{self._source}; {self._error}"

    @property
    def _source(self) -> str:
        """The source of the prediction."""
        if self.timings is None:
            return f"an estimate from the profile's numbers ({self.profile.source})"
        low, high = (f"{100 * part:+.0f} %" for part in self.timings.middle_half)
        return f"from {self.timings.count} {self.profile.source}, the middle half of which took {low} to {high}"

    @property
    def _error(self) -> str:
        """The known error of the prediction."""
        return _ERROR if self.is_measured else "its error has not been measured"

    def facts(self) -> dict[str, Any]:
        """Return the prediction as plain values."""
        names = ("seconds", "parts", "computing", "communication", "exposed", "host", "flops", "bound_by")
        found = {name: getattr(self, name) for name in names}
        found |= {"profile": self.profile.name, "source": self._source, "error": self._error}
        return found

    def picture(self, form: str) -> str:
        """Return the step as a picture ("svg") or as a trace for Perfetto ("json")."""
        drawn = Picture(f"predicted step, {self.profile.name}", self.pieces, self.curve)
        return drawn.svg() if form == "svg" else drawn.chrome()


@attrs.define(eq=False)
class _Streams:
    """Three clocks: of the host, of the stream that computes, and of the stream that communicates."""

    profile: Profile
    host: float = 0.0
    compute: float = 0.0
    send: float = 0.0
    computing: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    behind: float = 0.0
    ends: dict[int, float] = attrs.field(factory=dict)
    pieces: list[Piece] = attrs.field(factory=list)

    def run(self, entry: Entry, seconds: list[float]) -> None:
        """Run kernels, each when the host has queued it and the one before has ended."""
        start: float | None = None
        for each in seconds:
            if self.profile.device == "cpu":
                # The host computes itself.
                self.host = self.compute
            self.host += self.profile.launch
            begin = max(self.compute, self.host)
            self.behind += begin - self.compute
            start = begin if start is None else start
            self.compute = begin + each
            self.computing += each
        if start is not None:
            self.pieces.append(Piece(COMPUTING, entry.unit, f"{entry.stage} {entry.unit}", start, self.compute))

    def take(self, entry: Entry, seconds: float) -> None:
        """Do what was measured: the host computes and waits itself."""
        begin, self.compute = self.compute, self.compute + seconds
        if entry.kind == "kernels":
            self.computing += seconds
            self.pieces.append(Piece(COMPUTING, entry.unit, f"{entry.stage} {entry.unit}", begin, self.compute))
        elif entry.call is not None and seconds:
            self.communication += seconds
            self.exposed += seconds
            name = f"{entry.call.op} {entry.call.label}"
            lane, name = (COMMUNICATION, name) if entry.kind == "issued" else (WAITING, f"wait for {name}")
            self.pieces.append(Piece(lane, entry.call.label, name, begin, self.compute))
        else:
            self.behind += seconds

    def issue(self, entry: Entry, call: Call, seconds: float) -> None:
        """Queue a collective after what is queued to compute now."""
        self.host += self.profile.launch
        if self.profile.device == "cpu":
            # The same cores copy and compute, and it is over when somebody waits.
            self.compute += self.profile.launch
            self.behind += self.profile.launch
            self.ends[id(call)] = seconds
            return
        begin = max(self.send, self.compute, self.host)
        self.send = begin + seconds
        self.communication += seconds
        self.ends[id(call)] = self.send
        self.pieces.append(Piece(COMMUNICATION, call.label, f"{call.op} {call.label}", begin, self.send))

    def wait(self, call: Call) -> None:
        """Have the stream that computes wait for a collective."""
        end = self.ends.pop(id(call), 0.0)
        begin = self.compute
        if self.profile.device == "cpu":
            self.compute += end
            self.communication += end
            self.pieces.append(Piece(COMMUNICATION, call.label, f"{call.op} {call.label}", begin, self.compute))
        else:
            self.compute = max(self.compute, end)
        self.exposed += self.compute - begin
        if self.compute > begin:
            self.pieces.append(Piece(WAITING, call.label, f"wait for {call.op} {call.label}", begin, self.compute))


def predict(found: Rehearsal, profile: AnyProfile, timings: Timings | None = None) -> Prediction:
    """Return the time of the last step of a rehearsal.

    Each kernel takes the longer of its operations and its bytes; each collective its latency and the bytes of a ring.
    What runs beside what is as the runtime has ordered it. With `timings` of this machine, every stretch between
    collectives, and every collective, takes as long as it has taken there.
    """
    chosen = profile_named(profile)
    seconds = [chosen.seconds_of(work) for work in found.works]
    seconds_of_call = seconds_of_calls(chosen, found)
    streams = _Streams(chosen)
    step = found.last_step()
    measured = None if timings is None else Stretches.of(found, chosen).laid(timings)
    parts: dict[str, float] = defaultdict(float)
    flops = 0
    stage, began = "forward", 0.0
    heights: list[tuple[float, int]] = []
    phases: list[Piece] = []
    for place, entry in enumerate(step):
        if entry.kind == "stage":
            parts[stage] += streams.compute - began
            phases.append(Piece(PHASE, stage, stage, began, streams.compute))
            stage, began = entry.stage, streams.compute
        if measured is not None:
            flops += sum(found.works[number].flops for number in found.kernels[entry.start : entry.stop])
            streams.take(entry, measured[place])
        elif entry.kind == "kernels":
            numbers = found.kernels[entry.start : entry.stop]
            flops += sum(found.works[number].flops for number in numbers)
            streams.run(entry, [seconds[number] for number in numbers])
        elif entry.kind == "issued" and entry.call is not None:
            streams.issue(entry, entry.call, seconds_of_call(entry.call))
        elif entry.kind == "waited" and entry.call is not None:
            streams.wait(entry.call)
        heights.append((streams.compute, found.log.sizes[entry.place - 1] if entry.place else 0))
    parts[stage] += streams.compute - began
    phases.append(Piece(PHASE, stage, stage, began, streams.compute))
    end = max(streams.compute, streams.send)
    peak = max(height for _, height in heights)
    return Prediction(
        chosen,
        end,
        {name: spent for name, spent in parts.items() if spent},
        streams.computing,
        streams.communication,
        streams.exposed,
        streams.behind,
        flops,
        tuple(piece for piece in (*phases, *streams.pieces) if piece.end > piece.begin),
        Curve("memory", tuple(heights), found.costs.steps[-1].peak if found.costs.steps else peak),
        timings,
    )


def seconds_of_calls(profile: Profile, found: Rehearsal) -> Callable[[Call], float]:
    """A function that returns the time of a collective: its latency and the bytes of a ring, over links or network."""
    known: dict[tuple[str, int, int], float] = {}

    def seconds_of(call: Call) -> float:
        # The calls of a group have one tuple of members.
        key = (call.op, call.nbytes, id(call.members))
        if key not in known:
            known[key] = _seconds_of_call(profile, found, call)
        return known[key]

    return seconds_of


def _seconds_of_call(profile: Profile, found: Rehearsal, call: Call) -> float:
    members, size = call.members, found.setup.ranks_per_host
    sent = sent_nbytes(call.op, call.nbytes, rank=members.index(found.setup.rank), size=len(members))
    hosts = {rank // size for rank in members}
    on_host = sum(rank // size == found.setup.rank // size for rank in members)
    if len(hosts) == 1 or on_host == 1 or not sent:
        return profile.seconds_to_send(sent, leaves_host=len(hosts) > 1)
    # A ring over hosts leaves each host once; all cards of a host carry a part of the ring.
    within = profile.seconds_to_send(sent, leaves_host=False)
    across = profile.seconds_to_send(sent // on_host, leaves_host=True)
    return max(within, across)
