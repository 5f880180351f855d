"""The only way to watch units: they report their actions to their tree's fingerprint, and to instruments."""

from __future__ import annotations

from typing import Final, Literal, Protocol, final, runtime_checkable

import attrs

from flatparam_runtime.agreement.deed import Acting, DeedKind
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.agreement.nonfinite import NonfiniteGuard
from flatparam_runtime.unit.events import Event, EventKind, Instrument
from flatparam_runtime.unit.phases import Phase


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
