"""A segment that is several neighbours in a shard as one tensor: short ones take longer to call for than to step.

Addresses decide what is one tensor: tensors that lie in one storage at the right distances from each other are one,
whoever made them. Nothing here keeps the memory of a parameter, gradient or state alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_optim.segments.segment import State, SteppedTensor

__all__ = ["JoinedSegment", "JoinedView", "ScalarState"]

_ADDRESS: Final = Tensor.data_ptr
_GRAD: Final = attrgetter("grad")


@final
@attrs.define(eq=False)
class JoinedView:
    """A joined view is how tensors lie that are one tensor in memory."""

    offsets: tuple[int, ...]
    """The distance of each tensor from the first one, in elements."""
    numel: int
    """The elements from the start of the first tensor to the end of the last."""
    _distances: tuple[int, ...] = ()
    """The offsets in bytes."""
    _addresses: list[int] = attrs.field(factory=list)
    """The addresses of the tensors that were joined last."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The 1-D tensor that `tensors`, all of one dtype, are the parts of; `None` if they lie differently."""
        try:
            addresses = [*map(_ADDRESS, tensors)]
        except (TypeError, RuntimeError):
            # One is None, or a tensor that has no memory.
            return None
        first, itemsize = tensors[0], tensors[0].itemsize
        if addresses != self._addresses:
            if not self._distances:
                self._distances = tuple(offset * itemsize for offset in self.offsets)
            if addresses != [*map(addresses[0].__add__, self._distances)]:
                return None
            self._addresses = addresses
        storage = first.untyped_storage()
        if self.numel and addresses[0] + self.numel * itemsize > storage.data_ptr() + storage.nbytes():
            return None
        return first.detach().as_strided((self.numel,), (1,))


@final
@attrs.frozen(eq=False)
class ScalarState:
    """A scalar state is a number that each parameter of a joined segment has for itself, such as its count of steps."""

    value: Tensor
    """The number, as the stepped tensor has it."""
    each: Tensor
    """The numbers of all parameters, 1-D."""
    parts: tuple[Tensor, ...]
    """The elements of `each`, one for each parameter."""
    version: int
    """The version of `each`, which changes with every part."""

    @classmethod
    def of(cls, value: Tensor, count: int) -> Self:
        """`value` for each of `count` parameters."""
        each = value.detach().repeat(count)
        return cls(value, each, each.unbind(), each._version)

    def spread(self) -> Self:
        """Give every parameter the value."""
        self.each.copy_(self.value)
        return attrs.evolve(self, version=self.each._version)

    def is_in(self, found: Sequence[Tensor]) -> bool:
        """Whether `found` are the parts, and have the value."""
        return self.each._version == self.version and all(map(is_, found, self.parts))


@final
@attrs.define(eq=False)
class JoinedSegment:
    """A joined segment is several parameters of a shard that are stepped as one tensor.

    They lie one after the other with nothing between them but padding, which is zero, and have equal state: the same
    names, and equal numbers.
    """

    parameters: tuple[nn.Parameter, ...]
    view: JoinedView
    names: tuple[str, ...]
    """The names of their state."""
    scalars: dict[str, ScalarState] = attrs.field(factory=dict)
    """The numbers in their state, by name."""
    _views: dict[str, JoinedView] = attrs.field(factory=dict)
    """How their gradients lie, and each tensor of their state, by name."""
    _first: int = 0
    """The place of the first parameter's state in that of the optimizer."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], names: Iterable[str]) -> Self:
        """The segment of `parameters`, in the order of their memory, with state of these `names`."""
        start, itemsize = parameters[0].data_ptr(), parameters[0].itemsize
        offsets = tuple((parameter.data_ptr() - start) // itemsize for parameter in parameters)
        return cls(tuple(parameters), JoinedView(offsets, offsets[-1] + parameters[-1].numel()), tuple(names))

    def tensors(self, state: State) -> list[SteppedTensor] | None:
        """Make the one tensor, with one state. See `Segment.tensors`."""
        parameter = self.view.join(self.parameters)
        gradients = [*map(_GRAD, self.parameters)]
        if parameter is None or set(map(type, gradients)) != {Tensor}:
            return None
        parameter.grad = self._view(".grad").join(gradients)
        if parameter.grad is None:
            return None
        states = self._states(state)
        if not self.names:
            return None if any(states) else [SteppedTensor(parameter, {})]
        joined: dict[str, Tensor] = {}
        try:
            # The names of the others are found out when their state is read.
            if len(states[0]) != len(self.names):
                return None
            for name in self.names:
                value = self._join(name, states)
                if value is None:
                    return None
                joined[name] = value
        except (TypeError, KeyError):
            return None
        return [SteppedTensor(parameter, joined)]

    def _view(self, name: str) -> JoinedView:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = JoinedView(self.view.offsets, self.view.numel)
        return view

    def _states(self, state: State) -> list[Any]:
        """The parameters' state, which an optimizer mostly has in the same order: looking each up takes longer."""
        stop = self._first + len(self.parameters)
        if all(map(is_, islice(state, self._first, stop), self.parameters)) and stop <= len(state):
            return list(islice(state.values(), self._first, stop))
        self._first = next((n for n, parameter in enumerate(state) if parameter is self.parameters[0]), 0)
        return list(map(state.get, self.parameters))

    def _join(self, name: str, states: list[Any]) -> Tensor | None:
        scalar = self.scalars.get(name)
        if scalar is None:
            return self._view(name).join(list(map(itemgetter(name), states)))
        return scalar.value if scalar.is_in(list(map(itemgetter(name), states))) else None

    def settle(self, stepped: Sequence[SteppedTensor], state: State) -> None:
        """Give the parameters the state that is new, and the numbers. See `Segment.settle`."""
        (joined,) = stepped
        for name, value in joined.state.items():
            if joined.before.get(name) is not value:
                self._give(name, value, state)
            elif name in self.scalars:
                self.scalars[name] = self.scalars[name].spread()
        # Each parameter has changed, and autograd is to notice.
        torch.autograd.graph.increment_version(self.parameters)

    def unify_state(self, state: State) -> None:
        """Make one tensor of each state that is not one yet; each parameter has a view of it from then on."""
        for name in self.names:
            tensors = [state[parameter][name] for parameter in self.parameters]
            if not tensors[0].dim():
                self._give(name, tensors[0].clone(), state)
            elif self._view(name).join(tensors) is None:
                flat = tensors[0].new_zeros(self.view.numel)
                for part, tensor in zip(self._parts(flat), tensors, strict=True):
                    part.copy_(tensor)
                self._give(name, flat, state)

    def _give(self, name: str, value: Any, state: State) -> None:
        """Make the parts of `value` the state `name` of the parameters."""
        parts: Iterable[Any]
        if isinstance(value, Tensor) and value.dim():
            parts = self._parts(value)
        elif isinstance(value, Tensor):
            scalar = self.scalars[name] = ScalarState.of(value, len(self.parameters))
            parts = scalar.parts
        else:
            parts = [value] * len(self.parameters)
        for parameter, part in zip(self.parameters, parts, strict=True):
            state[parameter][name] = part
        if name not in self.names:
            self.names = (*self.names, name)

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        """The views of `flat`, 1-D, that belong to the parameters, in their shapes."""
        for parameter, start in zip(self.parameters, self.view.offsets, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)
