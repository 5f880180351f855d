"""When the next unit is gathered: a wrapper's settings, which count from the next pass on if they are set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from torch import nn

from flatparam.api import BackwardPrefetch
from flatparam.resolving import backward_prefetch_of, resolve_prefetch
from flatparam.wrapper.interior import unit_inside
from flatparam_runtime import Unit

__all__ = [
    "backward_prefetch",
    "forward_prefetch",
    "set_backward_prefetch",
    "set_forward_prefetch",
    "set_units_to_backward_prefetch",
    "set_units_to_forward_prefetch",
]


def backward_prefetch(unit: Unit) -> BackwardPrefetch | None:
    """Return when the next unit of the backward pass is gathered."""
    return backward_prefetch_of(unit.plan.prefetch)


def set_backward_prefetch(unit: Unit, when: Any) -> None:
    """Choose when the next unit of the backward pass is gathered; `None` is when it is needed."""
    _change(unit, backward=resolve_prefetch(False, when).backward)


def forward_prefetch(unit: Unit) -> int:
    """Return whether the next unit is gathered in the forward pass, by every device; how many, if more than one."""
    units = unit.plan.prefetch.forward or 0
    return units if units > 1 else bool(units)


def set_forward_prefetch(unit: Unit, units: int) -> None:
    """Choose how many units are gathered ahead in the forward pass; without any, the device chooses."""
    _change(unit, forward=int(units) or None)


def set_units_to_forward_prefetch(unit: Unit, modules: Iterable[nn.Module] | None) -> None:
    """Gather the units of `modules` when the forward of `unit` begins; `None`: what the last pass suggests."""
    unit.links.forward_prefetch = _units_of(modules)


def set_units_to_backward_prefetch(unit: Unit, modules: Iterable[nn.Module] | None) -> None:
    """Gather the units of `modules` when the backward of `unit` begins; `None`: what the forward suggests."""
    unit.links.backward_prefetch = _units_of(modules)


def _units_of(modules: Iterable[nn.Module] | None) -> list[Unit] | None:
    return None if modules is None else [unit_inside(module) for module in modules]


def _change(unit: Unit, **changes: Any) -> None:
    unit.change_plan(prefetch=attrs.evolve(unit.plan.prefetch, **changes))
