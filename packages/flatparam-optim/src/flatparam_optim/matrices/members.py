"""The parameters that an optimizer steps as wholes, whatever it was given: originals, or flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import attrs
from torch import nn

from flatparam_comm import FlatParameter, FlatParamHandle, Fragment, ParamSpec, Topology, handle_of, owner_of
from flatparam_optim.matrices.whole_step import Settings
from flatparam_runtime import holder_of

__all__ = ["Member", "drop_flat_gradients", "follow_gradients", "originals_in"]


def originals_in(parameter: nn.Parameter) -> Iterator[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """The originals that `parameter` stands for, each with its name in its unit (else `""`) and its full shape.

    A flat parameter stands for all of its originals, any other parameter for itself.
    """
    if isinstance(parameter, FlatParameter):
        handle = handle_of(parameter)
        if handle is not None:
            for index, slot in enumerate(handle.layout.slots):
                yield slot.spec.fqn, handle.original(index), slot.spec.shape
            return
    owner = owner_of(parameter)
    if owner is None:
        yield "", parameter, tuple(parameter.shape)
    else:
        spec = owner[0].layout.slots[owner[1]].spec
        yield spec.fqn, parameter, spec.shape


@final
@attrs.frozen(eq=False)
class Member:
    """A parameter that is stepped as a whole, of which this rank may hold a part; without a handle it holds all."""

    parameter: nn.Parameter
    settings: Settings
    handle: FlatParamHandle | None
    index: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter, settings: Settings) -> Member:
        """The member that an original, or a parameter of no unit, is."""
        handle, index = owner_of(parameter) or (None, 0)
        return cls(parameter, settings, handle, index)

    @property
    def topology(self) -> Topology | None:
        """The groups of ranks that share the parameter; `None` if this rank has it for itself."""
        unit = None if self.handle is None else holder_of(self.handle)
        return None if unit is None else unit.topology

    @property
    def spec(self) -> ParamSpec:
        """The facts about the whole parameter."""
        if self.handle is None:
            return ParamSpec.of("", self.parameter)
        return self.handle.layout.slots[self.index].spec

    @property
    def fragment(self) -> Fragment | None:
        """The part that this rank holds; `None` if it has the parameter for itself."""
        return None if self.handle is None else self.handle.layout.fragment(self.index, self.handle.rank)


def follow_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give originals of listed flat parameters the gradients that these have now.

    Somebody may have set a flat parameter's gradient to None, or replaced it, and the originals do not know.
    """
    for parameter in parameters:
        owner = owner_of(parameter)
        if parameter.grad is None or owner is None or not owner[0].exposure.lists_shard:
            continue
        handle, index = owner
        flat = handle.flat_param.grad
        if flat is None:
            parameter.grad = None
            continue
        gradient = flat[handle.layout.fragment(index, handle.rank).in_shard.as_slice()]
        if gradient.data_ptr() != parameter.grad.data_ptr():
            if parameter.grad_dtype != gradient.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient.view(parameter.shape)


def drop_flat_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free the gradient of each listed flat parameter whose originals are among `parameters` and have none any more."""
    handles = {owner[0]: None for owner in map(owner_of, parameters) if owner is not None}
    for handle in handles:
        if handle.exposure.lists_shard and not any(
            original.grad is not None for original in handle.exposure.originals().values()
        ):
            handle.flat_param.grad = None
