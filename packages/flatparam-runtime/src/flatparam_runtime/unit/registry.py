"""The unit of a module or of a flat parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice

from torch import Tensor, nn

from flatparam_comm import FlatParameter, FlatParamHandle, each_module, handle_of, owner_of
from flatparam_runtime.unit.unit import Unit

_UNIT = "_flatparam_unit"
"""The attribute of a module that holds its unit, so that both have the same lifetime."""


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that `module` is, or `None`."""
    unit: Unit | None = module.__dict__.get(_UNIT)
    return unit


def register_unit(module: nn.Module, unit: Unit) -> None:
    """Make `unit` the unit of `module`."""
    module.__dict__[_UNIT] = unit
    for handle in unit.handles:
        _HOLDERS[handle] = weakref.ref(unit)


_HOLDERS: weakref.WeakKeyDictionary[FlatParamHandle, weakref.ReferenceType[Unit]] = weakref.WeakKeyDictionary()


def holder_of(handle: FlatParamHandle) -> Unit | None:
    """Return the unit that holds a flat parameter, or `None`."""
    reference = _HOLDERS.get(handle)
    return None if reference is None else reference()


def holder_of_parameter(parameter: Tensor) -> Unit | None:
    """Return the unit whose flat parameter `parameter` is, or is a part of; None if it is neither."""
    if isinstance(parameter, FlatParameter):
        handle = handle_of(parameter)
    else:
        owner = owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
        handle = None if owner is None else owner[0]
    return None if handle is None else holder_of(handle)


def units_in(module: nn.Module) -> tuple[Unit, ...]:
    """Return the units of `module` and of everything below it, parents before children."""
    return tuple(unit for child in module.modules() if (unit := unit_of(child)) is not None)


def revive_units(module: nn.Module) -> None:
    """Register the units of `module`, which was copied or loaded from a file, as far as they are whole."""
    for unit in units_in(module):
        if unit.revive():
            register_unit(unit.module, unit)


def inside(module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules below `module` that are in no unit below it, each once, depth first."""
    return islice(each_module(module, lambda child: _UNIT in child.__dict__), 1, None)
