"""A wrapper's parameters and buffers: how they are listed, and how they move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatparam.wrapper.interior import Interior
from flatparam_core import clean_fqn, owner_of
from flatparam_runtime import Phase, Unit, holder_of, refuse_in_a_pass, shown

__all__ = ["listed", "moving_shards", "named", "not_summoned"]

T = TypeVar("T")


def named(interior: Interior, pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """`pairs` of names and tensors, with the names that a wrapper gives them now."""
    unit = interior.unit
    clean = interior.clean_names or unit.showing.wishes is not None or unit.phase is Phase.INSPECTING
    for name, value in pairs:
        yield (clean_fqn(name) if clean else name), value


def listed(pairs: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """`pairs` with what stands for each parameter in a list; none for what only the flat parameter stands for."""
    for name, parameter in pairs:
        shown_as = _stand_in(parameter)
        if shown_as is not None:
            yield name, shown_as


def _stand_in(parameter: nn.Parameter) -> nn.Parameter | None:
    owner = owner_of(parameter)
    if owner is None:
        return parameter
    handle, index = owner
    unit = holder_of(handle)
    if unit is None or unit.is_needed or unit.phase is Phase.INSPECTING or handle.exposure.hides_shard:
        return parameter
    held = handle.exposure.listed()
    return held[index] if held[0] is not handle.flat_param else None


def not_summoned(units: Iterable[Unit]) -> list[Unit]:
    """Return those whose full parameters are not shown by `summon_full_params`."""
    return [unit for unit in units if unit.showing.wishes is None]


@contextlib.contextmanager
def moving_shards(units: Iterable[Unit], fn: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """Move or cast the shards of `units` as wholes by `fn`; inside the context, modules show no parameters of theirs.

    Raises:
        FlatParamError: inside a forward or backward pass.
    """
    units = list(units)
    for unit in units:
        refuse_in_a_pass(unit)
        unit.reshard()
    with torch.no_grad():
        for unit in units:
            for handle in unit.handles:
                handle.apply(fn)
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(shown(unit, [[None] * len(handle.layout.slots) for handle in unit.handles]))
        yield
