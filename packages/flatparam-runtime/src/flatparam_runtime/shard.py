"""Shard a module in place, by hooks alone: no wrapper, and the module's class stays what it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import BoundParameter, FlatParamError, FlatParamHandle, Flattening, LayoutRule, discover, owner_of
from flatparam_runtime.agreement.units import names_left_whole
from flatparam_runtime.passes import attach
from flatparam_runtime.unit import (
    InitialWeights,
    Instrument,
    Unit,
    UnitBuffers,
    UnitModule,
    UnitPlan,
    holder_of,
    inside,
    next_number,
    register_unit,
    unit_of,
    units_in,
)

Initialise: TypeAlias = "Callable[[Callable[[str, Tensor], None]], None]"
"""Is given a function `pack(name, value)` and calls it for every parameter of the unit."""


def shard_module(
    module: nn.Module,
    plan: UnitPlan,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
    initialise: Initialise | None = None,
    rule_of: Callable[[BoundParameter], LayoutRule] | None = None,
    shares: Sequence[float] = (),
    by_hooks: bool = True,
) -> Unit:
    """Make `module` a unit: shard what its submodules' units do not already hold. Call it for the innermost first.

    Every rank of `plan.topology` calls it with an equal module, in the same order. Training code stays as it was: the
    module's forward pass gathers the parameters, the backward pass reduces the gradients. A parameter that another unit
    holds already is shared: that unit keeps it, and both gather it. What optimizers do with shards is another call,
    `notice_optimizers`, once for the process.

    Args:
        module: may already contain units; must not be one.
        ignored_modules: their parameters stay whole, on every rank, and are not reduced.
        ignored_parameters: they stay whole, too, and their gradients are not reduced.
        device: where full parameters live from now on; by default where they are.
        initialise: gives the parameters their values, one module after the other, before they are packed; by default
            they have them.
        rule_of: what of each parameter stays on one rank; by default boundaries between ranks lie anywhere.
        shares: for each rank of the shard group the weight of its part; empty gives all the same.
        by_hooks: hooks on the module gather and free its full parameters. If `False`, the caller has a wrapper whose
            forward is `call_unit`, which does so around all hooks of the module.

    Raises:
        FlatParamError: if the module is a unit already, or a parameter cannot be flattened.
        LayoutError: if the shares do not fit the shard group.
    """
    if unit_of(module) is not None:
        raise FlatParamError(f"{type(module).__name__} is a unit already: shard a module once")
    ignored = set(ignored_modules)

    def find() -> tuple[BoundParameter, ...]:
        return discover(
            module,
            ignored_parameters=ignored_parameters,
            skip_module=lambda child: child in ignored or unit_of(child) is not None,
        )

    found = find()
    borrowed = [b for b in found if owner_of(b.parameter) is not None]
    own = [b for b in found if owner_of(b.parameter) is None]
    flattening = _begin(module, own, plan, device, rule_of, shares) if own else None
    handles: tuple[FlatParamHandle, ...] = ()
    weights: InitialWeights | None = None
    if flattening is not None and initialise is not None:
        initialise(flattening.pack)
        names = {b.names[0] for b in own}
        # They may be other objects by now.
        handles = flattening.finish([b for b in find() if b.names[0] in names])
    elif flattening is not None:
        if plan.topology.data_parallel_size > 1:
            weights = InitialWeights.of([b.names[0] for b in own], [b.parameter for b in own])
        for b in own:
            flattening.pack(b.names[0], b.parameter)
        handles = flattening.finish(own)
    elif initialise is not None:
        # Buffers have to get their values, too; there is nothing to pack.
        initialise(lambda name, values: None)
    below = list(inside(module))
    held = UnitModule(weakref.ref(module), by_hooks, next_number(plan.topology))
    unit = Unit(type(module).__name__, plan, handles, held)
    register_unit(module, unit)
    for b in borrowed:
        _borrow(unit, b)
    with_buffers = [child for child in (module, *below) if child._buffers and child not in ignored]
    initial = None if weights is None else attrs.evolve(weights, stamp=unit.stamp())
    unit.held.look_after(UnitBuffers.of(module, with_buffers), initial, attach(unit, below), names_left_whole(module))
    return unit


def _begin(
    module: nn.Module,
    own: Sequence[BoundParameter],
    plan: UnitPlan,
    device: torch.device | None,
    rule_of: Callable[[BoundParameter], LayoutRule] | None,
    shares: Sequence[float],
) -> Flattening:
    return Flattening.begin(
        module,
        own,
        rank=plan.topology.shard.rank,
        world_size=plan.topology.shard.size,
        use_orig_params=plan.use_orig_params,
        precision=plan.precision,
        device=device,
        storage_device=plan.storage_device,
        rule_of=rule_of,
        shares=shares,
    )


def _borrow(unit: Unit, bound: BoundParameter) -> None:
    owner = owner_of(bound.parameter)
    assert owner is not None, "only parameters with an owner are borrowed"
    handle, index = owner
    lender = holder_of(handle)
    if lender is None:
        raise FlatParamError(
            f"parameter {bound.names[0]!r} belongs to a flat parameter that no unit holds; make one unit of a module "
            "that contains everything that shares the parameter"
        )
    handle.lend(index, bound.infos)
    if lender not in unit.links.lenders:
        unit.links.lenders.append(lender)
        lender.links.borrowers.append(unit)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Collect gradients without reducing them, in every unit of `module`; the next backward outside reduces the sum.

    The sum is kept unsharded, in the reduction dtype.
    """
    before = [(unit, unit.reducer.synchronises) for unit in units_in(module)]
    for unit, _ in before:
        unit.reducer.synchronises = False
    try:
        yield
    finally:
        for unit, synced in before:
            unit.reducer.synchronises = synced


@contextlib.contextmanager
def observe(module: nn.Module, instrument: Instrument) -> Iterator[None]:
    """Tell `instrument` what every unit of `module` does inside the context."""
    units = units_in(module)
    for unit in units:
        unit.observers.instruments.append(instrument)
    try:
        yield
    finally:
        for unit in units:
            unit.observers.instruments.remove(instrument)


def skipped_steps(module: nn.Module) -> int:
    """The number of backward passes after which steps were left out (`UnitPlan.nonfinite`); the same on every rank."""
    guards = (unit.observers.guard for unit in units_in(module))
    return max((guard.skipped for guard in guards if guard is not None), default=0)
