"""Every flat parameter of a model, and the names that its parameters have there."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from torch import nn
from typing_extensions import final

from flatparam_runtime import FlatParamHandle, Unit, clean_fqn, unit_of

__all__ = ["Place", "places_in"]


@final
@attrs.frozen(eq=False)
class Place:
    """A flat parameter of a model: the unit that holds it, and the unit's clean name there with a dot (or nothing)."""

    prefix: str
    unit: Unit
    handle: FlatParamHandle

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of its parameters in the model, in the order of the slots."""
        return tuple(self.prefix + fqn for fqn in self.handle.layout.fqns)

    @property
    def all_fqns(self) -> tuple[tuple[str, ...], ...]:
        """For each parameter, all the names under which the model reaches it; the first is its own."""
        return tuple(
            tuple(self.prefix + name for name in (slot.spec.fqn, *slot.spec.aliases))
            for slot in self.handle.layout.slots
        )


def places_in(model: nn.Module) -> Iterator[Place]:
    """The flat parameters of ``model``, in the order of its modules."""
    for name, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None:
            prefix = clean_fqn(name)
            for handle in unit.handles:
                yield Place(f"{prefix}." if prefix else "", unit, handle)
