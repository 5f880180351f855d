"""Every flat parameter of a model, and the names that its parameters have there."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from torch import nn
from typing_extensions import final

from flatparam_runtime import FlatParamHandle, Unit, clean_fqn, unit_of

__all__ = ["Place", "places_in", "places_of"]


@final
@attrs.frozen(eq=False)
class Place:
    """A flat parameter of a model, the unit that holds it, and the names of that unit there.

    `prefixes` are clean and end with a dot (or are empty): one, or several where the model reaches the unit by
    several paths.
    """

    prefixes: tuple[str, ...]
    unit: Unit
    handle: FlatParamHandle

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of its parameters in the model, in the order of the slots."""
        return tuple(self.prefixes[0] + fqn for fqn in self.handle.layout.fqns)


def places_of(unit: Unit) -> tuple[Place, ...]:
    """The flat parameters that `unit` uses, its own and those that it borrows, under their names in their units."""
    return tuple(Place(("",), each, handle) for each in (unit, *unit.lenders) for handle in each.handles)


def places_in(model: nn.Module) -> Iterator[Place]:
    """The flat parameters of `model`, in the order of its modules."""
    prefixes: dict[Unit, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None:
            prefix = clean_fqn(name)
            prefixes.setdefault(unit, []).append(f"{prefix}." if prefix else "")
    for unit, names in prefixes.items():
        for handle in unit.handles:
            yield Place(tuple(names), unit, handle)
