"""The one way in for whoever wants to watch: units tell instruments what they do."""

from __future__ import annotations

from typing import Literal, Protocol

import attrs
from typing_extensions import final

from flatparam_runtime.unit.phases import Phase

__all__ = ["Event", "EventKind", "EventLog", "Instrument"]

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
