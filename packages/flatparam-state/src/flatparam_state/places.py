"""Every flat parameter of a model, and the names that its parameters have there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
from torch import nn

from flatparam_runtime import FlatParamHandle, Unit, clean_fqn, unit_of

__all__ = ["Place", "places_in", "places_of"]


@final
@attrs.frozen(eq=False)
class Place:
    """A flat parameter of a model, the unit that holds it, and the names of its parameters there.

    `prefix` is that of the unit's first name; it is clean and ends with a dot (or is empty).
    """

    prefix: str
    unit: Unit
    handle: FlatParamHandle
    names: tuple[tuple[str, ...], ...]
    """All names of each parameter, in the order of the slots. The first is what `named_parameters()` of the unsharded
    model gives, whatever the units are; the others are those of a tied parameter."""

    fqns: tuple[str, ...] = attrs.field(init=False)
    """The first name of each parameter."""

    @fqns.default
    def _first_names(self) -> tuple[str, ...]:
        return tuple(names[0] for names in self.names)


def places_of(unit: Unit) -> tuple[Place, ...]:
    """The flat parameters that `unit` uses, its own and those that it borrows, under their names in their units."""
    return tuple(
        Place("", each, handle, tuple((slot.spec.fqn, *slot.spec.aliases) for slot in handle.layout.slots))
        for each in (unit, *unit.links.lenders)
        for handle in each.handles
    )


def places_in(model: nn.Module) -> Iterator[Place]:
    """Yield the flat parameters of `model`, in the order of its modules."""
    paths: dict[nn.Module, list[tuple[int, str]]] = {}
    units: dict[Unit, str] = {}
    for number, (name, module) in enumerate(model.named_modules(remove_duplicate=False)):
        path = clean_fqn(name)
        prefix = f"{path}." if path else ""
        paths.setdefault(module, []).append((number, prefix))
        unit = unit_of(module)
        if unit is not None:
            units.setdefault(unit, prefix)
    for unit, prefix in units.items():
        for handle in unit.handles:
            yield Place(prefix, unit, handle, tuple(_names(prefix, handle, paths)))


def _names(
    prefix: str, handle: FlatParamHandle, paths: Mapping[nn.Module, Sequence[tuple[int, str]]]
) -> Iterator[tuple[str, ...]]:
    """Yield all names of each parameter, in the order of the modules that hold it."""
    for fqn, infos in zip(handle.layout.fqns, handle.param_infos, strict=True):
        found = [
            (number, order, path + info.param_name)
            for order, info in enumerate(infos)
            for number, path in paths.get(info.module, ())
        ]
        yield tuple(dict.fromkeys(name for _, _, name in sorted(found))) or (prefix + fqn,)
