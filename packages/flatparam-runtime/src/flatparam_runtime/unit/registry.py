"""The units that there are: of a module, of a flat parameter, and those whose gradients wait for a later reduction."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final
from weakref import WeakSet

from torch import Tensor, nn

from flatparam_comm import FlatParameter, FlatParamHandle, each_module, handle_of, owner_of
from flatparam_runtime.agreement.fingerprint import Fingerprint
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
    owner = held_in(parameter)
    return None if owner is None else holder_of(owner[0])


def held_in(parameter: Tensor) -> tuple[FlatParamHandle, int | None] | None:
    """Return the handle that has the values of `parameter`, and its index there, which is `None` of a flat parameter.

    Return `None` for a parameter of no flat parameter.
    """
    if isinstance(parameter, FlatParameter):
        handle = handle_of(parameter)
        return None if handle is None else (handle, None)
    return owner_of(parameter) if isinstance(parameter, nn.Parameter) else None


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


# Gradients that wait, which `zero_grad()` drops as it drops `.grad`

_TOLD: Final = 3
WAITING: Final[WeakSet[Unit]] = weakref.WeakSet()
"""Units whose backward pass has not completed the reduction, and some that have been reduced since."""


def note_waiting(unit: Unit) -> None:
    """Note that gradients of `unit` wait for a later reduction: inside `no_sync`, or for the sum over copies."""
    WAITING.add(unit)


def drop_waiting(units: Collection[Unit]) -> None:
    """Drop all gradients of `units` that wait; every rank calls it, between passes, when it drops those of the model.

    Ranks compare whether they did, if there was a reduction since the last time.
    """
    wanted = set(units)
    for fingerprint in dict.fromkeys(unit.observers.fingerprint for unit in units):
        if fingerprint is not None:
            fingerprint.note_drop()
    _forget_the_reduced()
    for unit in _in_order():
        if unit in wanted:
            _drop(unit, {handle: range(len(handle.layout.slots)) for handle in unit.handles})
    _forget_weights(wanted)


def drop_waiting_of(parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of `parameters` that wait; every rank calls it, between passes.

    Args:
        parameters: what an optimizer holds. It need not hold parameters of which this rank has no element: the
            gradients that this rank has for the others' parts are dropped with all others of the model.
    """
    _forget_the_reduced()
    if not WAITING:
        return
    named = _indices_of(parameters)
    by_tree: dict[Fingerprint | None, list[Unit]] = {}
    for unit in _in_order():
        by_tree.setdefault(unit.observers.fingerprint, []).append(unit)
    for units in by_tree.values():
        if all(_elements_here(handle) <= named.get(handle, set()) for u in units for handle in u.trainable):
            for unit in units:
                _drop(unit, {handle: range(len(handle.layout.slots)) for handle in unit.handles})
            continue
        for unit in units:
            _drop(unit, {handle: sorted(named[handle]) for handle in unit.handles if handle in named})
    _forget_weights(unit for unit in WAITING if not named.keys().isdisjoint(unit.handles))


def _forget_weights(dropped: Iterable[Unit]) -> None:
    """Forget the weights of micro-batches of which no gradient is left, now that those of some units are dropped."""
    for weighing in {unit.reducer.weighing for unit in dropped}:
        left = (unit for unit in WAITING if unit.reducer.weighing is weighing and unit.reducer.has_left(unit.handles))
        if weighing is not None and not any(left):
            weighing.reset()


def _in_order() -> list[Unit]:
    """Return the units that wait, in the order of their trees, which is the same on every rank."""
    return sorted(WAITING, key=lambda unit: unit.observers.number)


def _forget_the_reduced() -> None:
    for unit in list(WAITING):
        if not unit.reducer.waits:
            WAITING.discard(unit)


def _indices_of(parameters: Iterable[Tensor]) -> dict[FlatParamHandle, set[int]]:
    found: dict[FlatParamHandle, set[int]] = {}
    for handle, index in filter(None, map(held_in, parameters)):
        found.setdefault(handle, set()).update(range(len(handle.layout.slots)) if index is None else (index,))
    return found


def _elements_here(handle: FlatParamHandle) -> set[int]:
    """Return the parameters of `handle` that are trained, and of which this rank has elements."""
    fragments = handle.layout.fragments(handle.rank)
    return {index for index, trained in enumerate(handle.trained) if trained and fragments[index].in_shard}


def _drop(unit: Unit, indices: Mapping[FlatParamHandle, Iterable[int]]) -> None:
    fqns: list[str] = []
    for handle, chosen in indices.items():
        dropped = list(chosen)
        unit.reducer.drop(handle, dropped)
        fqns += [handle.layout.fqns[index] for index in dropped]
    fingerprint = unit.observers.fingerprint
    if fqns and fingerprint is not None:
        more = f" and {len(fqns) - _TOLD} more" if len(fqns) > _TOLD else ""
        fingerprint.note_step(f"zero_grad() in unit {unit.name!r}, of {', '.join(fqns[:_TOLD])}{more}")
