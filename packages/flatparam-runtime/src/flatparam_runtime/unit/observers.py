"""The only way to watch units: they report their actions to their tree's fingerprint, and to instruments."""

from __future__ import annotations

from typing import Final, Literal, Protocol, final, runtime_checkable

import attrs

from flatparam_runtime.agreement.fingerprint import Acting, DeedKind, Fingerprint
from flatparam_runtime.agreement.nonfinite import NonfiniteGuard
from flatparam_runtime.unit.phases import Phase

EventKind = Literal["unshard", "use", "reshard", "reduce", "finish", "take over"]


@final
@attrs.frozen
class Event:
    """An action of a unit.

    `unshard`: memory for the full parameters was taken and their gather issued. `use`: the gather is over and the
    module shows the full parameters. `reshard`: the memory of the full parameters was given back. `reduce`: the
    reduction of the gradients was issued. `finish`: the reduction is over and the memory of the unsharded gradients was
    given back. `take over`: parameters to which the user had given different data since the last gather
    (`FlatParamHandle.taken_over`) were copied to the shard. `nbytes` is the size of the memory named here.
    """

    kind: EventKind
    unit: str
    phase: Phase
    nbytes: int


class Instrument(Protocol):
    """A receiver of events; it must not raise and must not change the unit.

    If it also has a method `on_wait(unit, operation)`, that is called with the names of a unit and of a collective
    ("all_gather", "reduce_scatter") just before the host waits for that; `use` or `finish` of the unit is the end.
    """

    def on_event(self, event: Event) -> None:
        """Receive `event`, which has just happened on this rank."""


@final
@attrs.define(eq=False)
class EventLog:
    """An instrument that keeps the events that it receives, for tests and for reading a schedule.

    >>> log = EventLog()  # doctest: +SKIP
    >>> with observe(model, log): model(x).sum().backward()  # doctest: +SKIP
    """

    events: list[Event] = attrs.field(factory=list)

    def on_event(self, event: Event) -> None:
        """Keep `event`."""
        self.events.append(event)

    def lines(self) -> list[str]:
        """Return the schedule as `"kind unit"` strings, in order."""
        return [f"{event.kind} {event.unit}" for event in self.events]


@runtime_checkable
class _Waits(Protocol):
    def on_wait(self, unit: str, operation: str) -> None: ...


class _Unit(Acting, Protocol):
    @property
    def phase(self) -> Phase: ...


_DEEDS: Final[dict[str, DeedKind]] = {"unshard": "gather", "reduce": "reduce", "train": "train"}
"""The events that must be the same on all ranks, with the fingerprint's names for them."""


@final
@attrs.define(eq=False)
class Observers:
    """The receivers of a unit's events: first the fingerprint, which may refuse one, and then the instruments."""

    number: int = 0
    """The unit's place in its tree, the same on every rank."""
    fingerprint: Fingerprint | None = None
    """The fingerprint of the unit's tree."""
    guard: NonfiniteGuard | None = None
    """The tree's guard against gradients that are not finite; None if it ignores them."""
    instruments: list[Instrument] = attrs.field(factory=list)

    def tell(self, unit: _Unit, kind: EventKind | Literal["train"], nbytes: int) -> None:
        """Report that the unit does what `kind` says, or is about to.

        "train" says that the unit trains different parameters from now on; its `nbytes` is a checksum of them, and
        instruments do not receive it.

        Raises:
            DivergenceError: on every rank, if the ranks are about to do different things.
        """
        if self.fingerprint is not None and kind in _DEEDS:
            self.fingerprint.note(_DEEDS[kind], unit, self.number, nbytes)
        if self.instruments and kind != "train":
            event = Event(kind, unit.name, unit.phase, nbytes)
            for instrument in self.instruments:
                instrument.on_event(event)

    def waits(self, unit: _Unit, operation: str) -> None:
        """Report that the host is about to wait for a collective of the unit, to the instruments that ask for it."""
        for instrument in self.instruments:
            if isinstance(instrument, _Waits):
                instrument.on_wait(unit.name, operation)
