"""How a unit trains: when it is gathered, and how its gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, Final, final

import attrs
from torch import Tensor, nn

from flatparam.addons import load
from flatparam.wrapper.interior import unit_inside
from flatparam_comm import HookStage
from flatparam_runtime import FlatParamError, Unit

_SUMS: Final = "flatparam_sums"


def set_units_to_forward_prefetch(unit: Unit, modules: Iterable[nn.Module] | None) -> None:
    """Gather the units of `modules` when the forward of `unit` begins; `None`: what the last pass suggests."""
    unit.links.forward_prefetch = _units_of(modules)


def set_units_to_backward_prefetch(unit: Unit, modules: Iterable[nn.Module] | None) -> None:
    """Gather the units of `modules` when the backward of `unit` begins; `None`: what the forward suggests."""
    unit.links.backward_prefetch = _units_of(modules)


def _units_of(modules: Iterable[nn.Module] | None) -> list[Unit] | None:
    return None if modules is None else [unit_inside(module) for module in modules]


def accumulate(model: nn.Module, weight: float | Tensor | None) -> AbstractContextManager[None]:
    """Compute one micro-batch inside; an add-on does it."""
    context: AbstractContextManager[None] = load(_SUMS).accumulate(model, weight)
    return context


def reduce_gradients(model: nn.Module) -> None:
    """Reduce what micro-batches have collected; an add-on does it."""
    load(_SUMS).reduce_gradients(model)


def uneven_inputs(model: nn.Module, step: Callable[[], object]) -> AbstractContextManager[None]:
    """Serve the ranks whose data end later; an add-on does it."""
    context: AbstractContextManager[None] = load(_SUMS).uneven_inputs(model, step)
    return context


@final
@attrs.frozen(eq=False)
class UnshardHandle:
    """A gather that was started by hand."""

    _unit: Unit

    @classmethod
    def begin(cls, unit: Unit) -> UnshardHandle:
        """Start to gather the full parameters of `unit`."""
        unit.begin_unshard()
        return cls(unit)

    def wait(self) -> None:
        """Have the module show its full parameters; calling it again costs nothing."""
        self._unit.finish_unshard()


def register_comm_hook(units: Sequence[Unit], state: object, hook: Callable[..., Any] | None, stage: HookStage) -> None:
    """Have `hook` called instead of a collective of each of `units`; see `FullyShardedDataParallel`.

    Raises:
        ValueError: if it cannot be called.
        AssertionError: if a unit has a hook for this stage already. In either case none is registered.
    """
    if hook is not None and not callable(hook):
        raise ValueError(f"expected a communication hook that can be called, found {type(hook).__name__}")
    if hook is not None:
        for unit in units:
            unit.reducer.hooks.check_free(stage, unit.name)
    for unit in units:
        whole = stage == "reduce" and unit.topology.shard.size == 1
        unit.reducer.hooks.set(stage, state, hook, in_place=stage == "all_reduce" or whole)


def set_requires_all_reduce(units: Iterable[Unit], requires_all_reduce: bool) -> None:
    """Whether the backward passes of `units` sum gradients over the copies of a shard."""
    for unit in units:
        unit.reducer.sums_copies = requires_all_reduce


def set_divide_factor(units: Sequence[Unit], factor: float | None) -> None:
    """Divide the sum of the gradients of `units` by `factor`; `None`: by the number of ranks.

    Raises:
        ValueError: for a factor that is no number above zero, or is infinite.
        FlatParamError: if gradients of passes without synchronisation wait for their reduction.
    """
    is_number = isinstance(factor, Real) and not isinstance(factor, bool)
    if factor is not None and not (is_number and 0 < factor < math.inf):
        raise ValueError(f"expected a divide factor above zero, found {factor!r}")
    for unit in units:
        if unit.reducer.unsynced and factor != unit.reducer.divide_factor:
            raise FlatParamError(
                f"unit {unit.name!r}, rank {unit.topology.rank}: expected a new divisor of gradients between two "
                "accumulations, found gradients of backward passes without synchronisation, which were collected with "
                "the old one; set it before the first of these passes, or after the one that synchronises"
            )
    # Only now: if one unit refuses, none is changed.
    for unit in units:
        unit.reducer.divide_factor = factor
