"""The warnings and log lines of a unit with `TORCH_DISTRIBUTED_DEBUG=INFO`."""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import final

import attrs

from flatparam.observing.stopwatch import is_info_wanted
from flatparam_runtime import Event, Unit

__all__ = ["watch_for_debugging"]

_LOGGER = logging.getLogger(__name__)


def watch_for_debugging(unit: Unit) -> None:
    """With `TORCH_DISTRIBUTED_DEBUG=INFO`, warn of data that is taken over, and log each reduction of `unit`."""
    if is_info_wanted():
        unit.observers.instruments.append(_DebugLog(weakref.ref(unit)))


@final
@attrs.frozen
class _DebugLog:
    _unit: weakref.ReferenceType[Unit]

    def on_event(self, event: Event) -> None:
        unit = self._unit()
        if event.kind == "take over" and unit is not None:
            names = ", ".join(name for handle in unit.handles for name in handle.taken_over)
            warnings.warn(
                f"unit {event.unit!r}: {names} had been given other data, which was copied to the shard; each rank has "
                "to give its own part, or all the same whole",
                stacklevel=2,
            )
        elif event.kind in ("reduce", "finish"):
            _LOGGER.info("unit %r: %s, %d bytes of gradients", event.unit, event.kind, event.nbytes)
