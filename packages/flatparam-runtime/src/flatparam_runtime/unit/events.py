"""The actions of units, as instruments receive them."""

from __future__ import annotations

from typing import Literal, Protocol, final

import attrs

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
        ...


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
