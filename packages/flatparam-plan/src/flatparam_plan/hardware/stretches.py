"""How long a real rank takes from one collective to the next: measured with few blocks, and laid out for all."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import attrs
from torch import Tensor

from flatparam_comm import Collectives, ForwardingCollectives, Parts, Pending, ReduceOp, TakesParts, takes_parts
from flatparam_plan.hardware.profile import Profile
from flatparam_plan.plan_error import PlanError
from flatparam_plan.rehearsal import Entry, Rehearsal
from flatparam_plan.training import Trained

_MARKS: Final = ("stage", "issued", "waited")


@final
@attrs.frozen(eq=False)
class _Stretch:
    """The kernels and calls of a rehearsal between two marks, and the mark at the end."""

    key: Any
    """Equal for stretches of units of a kind, which take as long as each other."""
    kernels: Sequence[int]
    """The places of runs of kernels in the step."""
    estimates: Sequence[float]
    """The time that a profile gives each of them."""
    mark: int | None
    """The place of the mark in the step; `None` at the end of the step."""
    mark_key: Any

    @property
    def estimate(self) -> float:
        """The time that a profile gives the kernels."""
        return sum(self.estimates)


@final
@attrs.frozen(eq=False)
class Stretches:
    """The last step of a rehearsal, cut at its collectives and stages."""

    step: Sequence[Entry]
    _stretches: Sequence[_Stretch]

    @classmethod
    def of(cls, found: Rehearsal, profile: Profile) -> Stretches:
        """Cut a rehearsal; the profile says which kernels take longer than others."""
        step = found.last_step()
        kinds = {each.name: attrs.evolve(each, name="") for each in found.units}
        of_work = [profile.seconds_of(work) + profile.launch for work in found.works]
        stretches: list[_Stretch] = []
        kernels: list[int] = []
        before: Any = None
        for place, entry in enumerate([*step, None]):
            if entry is not None and entry.kind == "kernels":
                kernels.append(place)
            if entry is not None and entry.kind not in _MARKS:
                continue
            what = _what(entry, kinds)
            units = tuple(kinds.get(step[each].unit) for each in kernels)
            estimates = [
                sum(of_work[number] for number in found.kernels[step[each].start : step[each].stop]) for each in kernels
            ]
            mark = None if entry is None else place
            stretches.append(_Stretch((before, units, what), kernels, estimates, mark, what))
            kernels, before = [], what
        return cls(step, stretches)

    def timed(self, steps: Sequence[Sequence[Lap]]) -> Timings:
        """Return the times of these stretches, of steps that a rank has run: each mark, and the first of the next step.

        Raises:
            PlanError: if a step did something else than the rehearsal.
        """
        kinds = [self.step[each.mark].kind for each in self._stretches if each.mark is not None]
        spans: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        calls: dict[Any, list[float]] = defaultdict(list)
        for marks in steps:
            if [each.kind for each in marks[:-1]] != kinds:
                raise PlanError(
                    f"expected a step of {len(kinds)} stages and collectives, as in the rehearsal, found "
                    f"{len(marks) - 1} others; plan a program that does the same in every step"
                )
            before = marks[0].begin
            for stretch, mark in zip(self._stretches, marks, strict=True):
                spans[stretch.key].append((mark.begin - before, stretch.estimate))
                calls[stretch.mark_key].append(mark.end - mark.begin)
                before = mark.end
        found = Timings(
            {key: (_median(t for t, _ in each), _median(e for _, e in each)) for key, each in spans.items()},
            {key: statistics.median(each) for key, each in calls.items()},
        )
        # What disturbs a step now and then is in the median of none of its parts.
        wholes = [marks[-1].end - marks[0].begin for marks in steps]
        whole = statistics.median(wholes)
        low, _, high = statistics.quantiles(wholes, n=4) if len(wholes) > 1 else wholes * 3
        scaled = found.times(whole / sum(self.laid(found)))
        return attrs.evolve(scaled, count=len(steps), middle_half=(low / whole - 1, high / whole - 1))

    def laid(self, timings: Timings) -> list[float]:
        """Return the seconds of each entry of the step; those between marks without kernels count to the mark."""
        seconds = [0.0] * len(self.step)
        for stretch in self._stretches:
            whole = timings.of_stretch(stretch.key, stretch.estimate)
            for place, estimate in zip(stretch.kernels, stretch.estimates, strict=True):
                seconds[place] += whole * estimate / stretch.estimate if stretch.estimate else 0.0
            if stretch.mark is not None:
                seconds[stretch.mark] += timings.calls.get(stretch.mark_key, 0.0)
                if not stretch.estimate:
                    seconds[stretch.mark] += whole
        return seconds


@final
@attrs.frozen(eq=False)
class Timings:
    """Medians of a rank's times: of stretches, each beside its estimate, and of issuing and waiting."""

    spans: Mapping[Any, tuple[float, float]]
    calls: Mapping[Any, float]
    count: int = 1
    """The number of steps."""
    middle_half: tuple[float, float] = (0.0, 0.0)
    """The first and the third quartile of the steps, as parts of the median by which they differ from it."""

    def times(self, factor: float) -> Timings:
        """Return each time, so many times as long."""
        return attrs.evolve(
            self,
            spans={key: (seconds * factor, estimate) for key, (seconds, estimate) in self.spans.items()},
            calls={key: seconds * factor for key, seconds in self.calls.items()},
        )

    def of_stretch(self, key: Any, estimate: float) -> float:
        """The time of a stretch; of more or fewer kernels than were measured in proportion to their estimates."""
        if key in self.spans:
            seconds, measured = self.spans[key]
            return seconds * estimate / measured if measured else seconds
        took, expected = (sum(each[number] for each in self.spans.values()) for number in (0, 1))
        return estimate * took / expected if expected else estimate


def _median(values: Iterator[float]) -> float:
    return statistics.median(list(values))


def _what(entry: Entry | None, kinds: Mapping[str, Any]) -> Any:
    """Return the kind of a mark, without the names of units."""
    if entry is None:
        return None
    call = entry.call
    asked = None if call is None else (call.op, call.nbytes, kinds.get(call.label))
    return (entry.kind, entry.stage, asked)


# When the host of a real rank issues collectives, waits for them, and goes from stage to stage


@final
class Lap(NamedTuple):
    """One act of the host: "stage", "issued" or "waited", from `begin` to `end` in seconds."""

    kind: str
    begin: float
    end: float


@final
@attrs.define(eq=False)
class Clock:
    """A watcher that notes when each stage begins, and when collectives are issued and waited for."""

    laps: list[Lap] = attrs.field(factory=list)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Note when the stage begins."""
        now = time.perf_counter()
        self.laps.append(Lap("stage", now, now))
        yield

    def made(self, trained: Trained) -> None:
        """Nothing is noted of it."""

    def note(self, kind: str, begin: float) -> None:
        """Note what has begun then and ends now."""
        self.laps.append(Lap(kind, begin, time.perf_counter()))


@final
@attrs.frozen(eq=False)
class _Clocked:
    """A pending that notes its first wait."""

    inner: Pending
    clock: Clock
    waited: list[bool] = attrs.field(factory=list)

    def wait(self) -> None:
        """Wait, and note how long."""
        begin = time.perf_counter()
        self.inner.wait()
        if not self.waited:
            self.waited.append(True)
            self.clock.note("waited", begin)

    def done(self) -> bool:
        """Return whether it is over."""
        return self.inner.done()


@final
class ClockedCollectives(ForwardingCollectives):
    """Collectives that tell a clock when they are issued and waited for."""

    __slots__ = ("clock",)

    def __init__(self, inner: Collectives, clock: Clock) -> None:
        """Tell `clock` of the calls to `inner`."""
        super().__init__(inner)
        self.clock = clock

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather by `inner`, and note when that was issued."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.all_gather(output, shard, label=label))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce and scatter by `inner`, and note when that was issued."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.reduce_scatter(output, full, op=op, label=label))

    @property
    def reduce_scatter_parts(self) -> Callable[..., Pending]:
        """The same for gradients that lie where autograd left them; it exists only if `inner` has it."""
        if not takes_parts(self.inner):
            raise AttributeError(f"{self.inner!r} takes no parts: it has no reduce_scatter_parts")
        return functools.partial(self._parts, self.inner)

    def _parts(self, inner: TakesParts, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        begin = time.perf_counter()
        return self._issued(begin, inner.reduce_scatter_parts(output, full, label=label))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce by `inner`, and note when that was issued."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.all_reduce(tensor, op=op, label=label))

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Broadcast by `inner`, and note when that was issued."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.broadcast(tensor, root=root, label=label))

    def _issued(self, begin: float, pending: Pending) -> Pending:
        self.clock.note("issued", begin)
        return _Clocked(pending, self.clock)

    def _decorate(self, inner: Collectives) -> Collectives:
        return ClockedCollectives(inner, self.clock)
