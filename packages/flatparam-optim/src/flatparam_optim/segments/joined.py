"""A segment that is several neighbours in a shard as one tensor: short ones take longer to call for than to step.

Addresses decide what is one tensor: tensors that lie in one storage at the right distances from each other are one,
whoever made them. Nothing here keeps the memory of a parameter, gradient or state alive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import FlatParamHandle, owner_of
from flatparam_optim.segments.step_segment import DTYPES, STEP_NUMEL, State, SteppedTensor, is_like

_ADDRESS: Final = Tensor.data_ptr
_GRAD: Final = attrgetter("grad")


@final
@attrs.define(eq=False)
class _JoinedView:
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
        """Return the 1-D tensor that `tensors`, all of one dtype, are the parts of; `None` if they lie differently."""
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
        base = first._base
        if base is not None and base.numel() == self.numel and base.dim() == 1 and base.data_ptr() == addresses[0]:
            # They are views of it, and of all that it has.
            return base
        storage = first.untyped_storage()
        if self.numel and addresses[0] + self.numel * itemsize > storage.data_ptr() + storage.nbytes():
            return None
        if torch.is_grad_enabled():
            first = first.detach()
        return first.as_strided((self.numel,), (1,))


@final
@attrs.frozen(eq=False)
class _ScalarState:
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
        return type(self)(self.value, self.each, self.parts, self.each._version)

    def is_in(self, found: Sequence[Tensor]) -> bool:
        """Return whether `found` are the parts, and have the value."""
        return self.each._version == self.version and all(map(is_, found, self.parts))


@final
@attrs.define(eq=False)
class JoinedSegment:
    """A joined segment is several parameters of a shard that are stepped as one tensor.

    They lie one after the other with nothing between them but padding, which is zero, and have equal state: the same
    names, and equal numbers.
    """

    parameters: tuple[nn.Parameter, ...]
    view: _JoinedView
    names: tuple[str, ...]
    """The names of their state."""
    scalars: dict[str, _ScalarState] = attrs.field(factory=dict)
    """The numbers in their state, by name."""
    _views: dict[str, _JoinedView] = attrs.field(factory=dict)
    """How their gradients lie, and each tensor of their state, by name."""
    _first: int = 0
    """The place of the first parameter's state in that of the optimizer."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], names: Iterable[str]) -> Self:
        """Return the segment of `parameters`, in the order of their memory, with state of these `names`."""
        start, itemsize = parameters[0].data_ptr(), parameters[0].itemsize
        offsets = tuple((parameter.data_ptr() - start) // itemsize for parameter in parameters)
        return cls(tuple(parameters), _JoinedView(offsets, offsets[-1] + parameters[-1].numel()), tuple(names))

    def tensors(self, state: State) -> list[SteppedTensor] | None:
        """Make the one tensor, with one state; `None` if a parameter is not as it was."""
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
        try:
            # The names of the others are found out when their state is read.
            if len(states[0]) != len(self.names):
                return None
            joined: dict[str, Any] = {name: self._join(name, states) for name in self.names}
        except (TypeError, KeyError):
            return None
        return None if any(value is None for value in joined.values()) else [SteppedTensor(parameter, joined)]

    def _view(self, name: str) -> _JoinedView:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = _JoinedView(self.view.offsets, self.view.numel)
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
        """Give the parameters the state that is new, and the numbers."""
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
            scalar = self.scalars[name] = _ScalarState.of(value, len(self.parameters))
            parts = scalar.parts
        else:
            parts = [value] * len(self.parameters)
        for parameter, part in zip(self.parameters, parts, strict=True):
            state[parameter][name] = part
        if name not in self.names:
            self.names = (*self.names, name)

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the views of `flat`, 1-D, that belong to the parameters, in their shapes."""
        for parameter, start in zip(self.parameters, self.view.offsets, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)


# The search for parameters that lie side by side in a shard, which an optimizer can step as joined segments


def join_adjacent(parameters: Sequence[nn.Parameter], state: State) -> list[JoinedSegment]:
    """Return the joined segments among `parameters`, which have gradients, and share their hyper-parameters.

    Args:
        parameters: original parameters, in any order.
        state: the optimizer's.
    """
    solid = [parameter for parameter in parameters if parameter.numel()]
    numbers = _numbers(
        value
        for parameter in solid
        for value in (state.get(parameter) or {}).values()
        if type(value) is Tensor and value.dim() == 0
    )
    found = [_Neighbour.of(parameter, state, numbers) for parameter in solid]
    return [
        JoinedSegment.of([each.parameter for each in neighbours], neighbours[0].names)
        for neighbours in _in_rows([each for each in found if each is not None])
        if len(neighbours) > 1
    ]


@final
@attrs.frozen(eq=False)
class _Neighbour:
    """A neighbour is a parameter that can be part of a joined segment, with its bytes `[start, stop)`."""

    parameter: nn.Parameter
    start: int
    stop: int
    handle: FlatParamHandle
    index: int
    """Its slot in the flat parameter."""
    distance: int
    """From its own bytes to those of its gradient."""
    names: tuple[str, ...]
    """The names of its state."""
    likeness: Hashable
    """The kinds of its state tensors and its numbers, in which all parameters of a segment are equal."""

    @classmethod
    def of(cls, parameter: nn.Parameter, state: State, numbers: Mapping[int, Hashable]) -> Self | None:
        """`None` if the parameter has to be stepped by itself.

        Args:
            numbers: see `_numbers`.
        """
        owner, gradient, own = owner_of(parameter), parameter.grad, state.get(parameter) or {}
        if owner is None or type(parameter) is not nn.Parameter or type(gradient) is not Tensor:
            return None
        if parameter.dtype not in DTYPES or parameter.is_inference() or not is_like(gradient, parameter):
            return None
        likeness: list[Hashable] = [parameter.dtype, parameter.device]
        for name, value in own.items():
            if type(value) is not Tensor:
                return None
            if value.dim() == 0:
                likeness.append((name, value.dtype, value.device, numbers[id(value)]))
            elif is_like(value, parameter):
                likeness.append((name, value.dtype, value.device))
            else:
                return None
        start = parameter.data_ptr()
        stop = start + parameter.numel() * parameter.itemsize
        distance = gradient.data_ptr() - start
        return cls(parameter, start, stop, *owner, distance, tuple(own), tuple(likeness))

    def follows(self, before: _Neighbour) -> bool:
        """Return whether nothing but padding lies between `before` and this parameter."""
        return (
            self.handle is before.handle
            and self.distance == before.distance
            and self.start >= before.stop
            and before.index < self.index
            and not any(slot.span for slot in self.handle.layout.slots[before.index + 1 : self.index])
            and self.likeness == before.likeness
        )


def _numbers(values: Iterable[Tensor]) -> dict[int, Hashable]:
    """Return the numbers in tensors of one element, by `id`, read together, since each look at an accelerator waits."""
    alike: dict[Hashable, list[Tensor]] = {}
    for value in values:
        alike.setdefault((value.dtype, value.device), []).append(value)
    found: dict[int, Hashable] = {}
    for tensors in alike.values():
        found.update(zip(map(id, tensors), torch.stack(tensors).detach().tolist(), strict=True))
    return found


def _in_rows(found: Sequence[_Neighbour]) -> list[list[_Neighbour]]:
    """Put neighbours in rows of at most `STEP_NUMEL` elements; a longer parameter is alone.

    The order is that of the neighbours' handles, wherever the memory of each lies, so that it is the same in every run.
    """
    handles: dict[FlatParamHandle, list[_Neighbour]] = {}
    for each in found:
        handles.setdefault(each.handle, []).append(each)
    rows: list[list[_Neighbour]] = []
    for each in chain.from_iterable(sorted(own, key=attrgetter("start")) for own in handles.values()):
        last = rows[-1] if rows else []
        nbytes = STEP_NUMEL.value * each.parameter.itemsize
        if last and each.follows(last[-1]) and each.stop - last[0].start <= nbytes:
            last.append(each)
        else:
            rows.append([each])
    return rows
