"""Shard a module in place, by hooks alone: no wrapper, and the module's class stays what it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import nn

from flatparam_comm import FlatParamError, discover, flatten_module
from flatparam_runtime.events import Instrument
from flatparam_runtime.hooks import attach
from flatparam_runtime.plan import UnitPlan
from flatparam_runtime.tree import register_unit, unit_of, units_in
from flatparam_runtime.unit import Unit

__all__ = ["no_sync", "observe", "shard_module"]


def shard_module(
    module: nn.Module,
    plan: UnitPlan,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Unit:
    """Make `module` a unit: shard what its submodules' units do not already hold. Call it for the innermost first.

    Every rank of `plan.topology` calls it with an equal module, in the same order. Training code stays as it was: the
    module's forward pass gathers the parameters, the backward pass reduces the gradients.

    Args:
        module: may already contain units; must not be one.
        ignored_modules: their parameters stay whole, on every rank, and are not reduced.
        ignored_parameters: likewise.
        device: where the parameters live from now on; by default where they are.

    Raises:
        FlatParamError: where the module is a unit already, or a parameter cannot be flattened.
    """
    if unit_of(module) is not None:
        raise FlatParamError(f"{type(module).__name__} is a unit already: shard a module once")
    ignored = set(ignored_modules)
    shard = plan.topology.shard
    handles = flatten_module(
        module,
        rank=shard.rank,
        world_size=shard.size,
        use_orig_params=plan.use_orig_params,
        precision=plan.precision,
        device=device,
        parameters=discover(
            module,
            ignored_parameters=ignored_parameters,
            skip_module=lambda child: child in ignored or unit_of(child) is not None,
        ),
    )
    unit = Unit(type(module).__name__, plan, handles, weakref.ref(module))
    register_unit(module, unit)
    attach(unit)
    return unit


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Collect gradients without reducing them, in every unit of `module`; the next backward outside reduces the sum.

    The sum is kept unsharded, in the reduction dtype.
    """
    before = [(unit, unit.sync_gradients) for unit in units_in(module)]
    for unit, _ in before:
        unit.sync_gradients = False
    try:
        yield
    finally:
        for unit, synced in before:
            unit.sync_gradients = synced


@contextlib.contextmanager
def observe(module: nn.Module, instrument: Instrument) -> Iterator[None]:
    """Tell `instrument` what every unit of `module` does inside the context."""
    units = units_in(module)
    for unit in units:
        unit.instruments.append(instrument)
    try:
        yield
    finally:
        for unit in units:
            unit.instruments.remove(instrument)
