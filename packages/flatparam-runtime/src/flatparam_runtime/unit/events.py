"""The one way in for whoever wants to watch: units tell their tree's fingerprint, and instruments, what they do."""

from __future__ import annotations

from typing import Final, Literal, Protocol

import attrs
from typing_extensions import final

from flatparam_runtime.agreement.fingerprint import Acting, DeedKind, Fingerprint
from flatparam_runtime.unit.phases import Phase

__all__ = ["Event", "EventKind", "EventLog", "Instrument", "Observers"]

EventKind = Literal["unshard", "use", "reshard", "reduce", "finish", "take over"]


@final
@attrs.frozen
class Event:
    """Something that a unit did.

    `unshard`: memory for the full parameters was taken and their gather started. `use`: the bytes are there and the
    module shows the full parameters. `reshard`: that memory was given back. `reduce`: the reduction of the
    gradients started. `finish`: it is over and the memory of the unsharded gradients was given back. `take over`:
    parameters that the user had given other data since the last gather (`FlatParamHandle.taken_over`) were copied to
    the shard. `nbytes` is that memory.
    """

    kind: EventKind
    unit: str
    phase: Phase
    nbytes: int


class Instrument(Protocol):
    """Anything that wants to be told; it must not raise and must not change the unit."""

    def on_event(self, event: Event) -> None:
        """Take notice of `event`, which has just happened on this rank."""
        ...


@final
@attrs.define(eq=False)
class EventLog:
    """An instrument that keeps what it is told, for tests and for reading a schedule.

    >>> log = EventLog()  # doctest: +SKIP
    >>> with observe(model, log): model(x).sum().backward()  # doctest: +SKIP
    """

    events: list[Event] = attrs.field(factory=list)

    def on_event(self, event: Event) -> None:
        """Keep `event`."""
        self.events.append(event)

    def lines(self) -> list[str]:
        """The schedule as `"kind unit"` strings, in order."""
        return [f"{event.kind} {event.unit}" for event in self.events]


class _Unit(Acting, Protocol):
    @property
    def phase(self) -> Phase: ...


_DEEDS: Final[dict[str, DeedKind]] = {"unshard": "gather", "reduce": "reduce", "train": "train"}
"""What all ranks have to do alike, under the fingerprint's names."""


@final
@attrs.define(eq=False)
class Observers:
    """Who is told what a unit does: first the fingerprint, which may refuse it, and then the instruments."""

    number: int = 0
    """The unit's place in its tree, the same on every rank."""
    fingerprint: Fingerprint | None = None
    """Its tree's."""
    instruments: list[Instrument] = attrs.field(factory=list)

    def tell(self, unit: _Unit, kind: EventKind | Literal["train"], nbytes: int) -> None:
        """The unit does what `kind` says, or is about to.

        "train" says that the unit trains other parameters from now on, with a checksum of them; instruments are not
        told of it.

        Raises:
            DivergenceError: on every rank, if the ranks are about to do different things.
        """
        if self.fingerprint is not None and kind in _DEEDS:
            self.fingerprint.note(_DEEDS[kind], unit, self.number, nbytes)
        if self.instruments and kind != "train":
            event = Event(kind, unit.name, unit.phase, nbytes)
            for instrument in self.instruments:
                instrument.on_event(event)
