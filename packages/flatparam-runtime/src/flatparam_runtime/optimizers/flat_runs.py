"""Neighbours in a shard that an optimizer can step as one tensor: short ones take longer to call for than to step.

Everything is decided by addresses, and nothing here keeps the memory of a parameter, gradient or state alive: tensors
that lie in one storage at the right distances from each other are one tensor, whoever made them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, itemgetter
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self, final

from flatparam_comm import FlatParamHandle, owner_of
from flatparam_runtime.optimizers.stand_in import DTYPES, MAX_NUMEL, StandIn, State, alike

__all__ = ["Row", "Run", "find_runs"]

_ADDRESS: Final = Tensor.data_ptr
_GRAD: Final = attrgetter("grad")


@final
@attrs.define(eq=False)
class Row:
    """Where tensors lie that are one: their distances from the first, in elements."""

    offsets: tuple[int, ...]
    numel: int
    _distances: tuple[int, ...] = ()
    """In bytes."""
    _addresses: list[int] = attrs.field(factory=list)
    """Of the tensors that were joined last."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The 1-D tensor that `tensors`, all of one dtype, are the parts of; `None` where they are not."""
        try:
            addresses = [*map(_ADDRESS, tensors)]
        except (TypeError, RuntimeError):  # None, or a tensor that has no memory
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
class Shared:
    """A number that every parameter of a run has for itself, such as its count of steps: `each` holds them all."""

    value: Tensor
    each: Tensor
    parts: tuple[Tensor, ...]
    """The elements of `each`, one for each parameter."""
    version: int
    """Of `each`: it changes with every part."""

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
class Run:
    """Parameters that lie one after the other in a shard, with nothing between them but padding, which is zero.

    They have equal state: the same names, and equal numbers.
    """

    parameters: tuple[nn.Parameter, ...]
    row: Row
    names: tuple[str, ...]
    """Of their state."""
    shared: dict[str, Shared] = attrs.field(factory=dict)
    _rows: dict[str, Row] = attrs.field(factory=dict)
    _first: int = 0
    """Where the optimizer's state has that of the first parameter."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], names: Iterable[str]) -> Self:
        """The run of `parameters`, in the order of their memory."""
        start, itemsize = parameters[0].data_ptr(), parameters[0].itemsize
        offsets = tuple((parameter.data_ptr() - start) // itemsize for parameter in parameters)
        return cls(tuple(parameters), Row(offsets, offsets[-1] + parameters[-1].numel()), tuple(names))

    def _row(self, name: str) -> Row:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = Row(self.row.offsets, self.row.numel)
        return row

    def stand_ins(self, state: State) -> list[StandIn] | None:
        """The run as one tensor with one state; `None` where anything is not as it was when the run was found."""
        parameter = self.row.join(self.parameters)
        gradients = [*map(_GRAD, self.parameters)]
        if parameter is None or set(map(type, gradients)) != {Tensor}:
            return None
        parameter.grad = self._row(".grad").join(gradients)
        if parameter.grad is None:
            return None
        states = self._states(state)
        if not self.names:
            return None if any(states) else [StandIn(parameter, {})]
        joined: dict[str, Tensor] = {}
        try:
            if len(states[0]) != len(self.names):  # the rest is asked for the names
                return None
            for name in self.names:
                value = self._join(name, states)
                if value is None:
                    return None
                joined[name] = value
        except (TypeError, KeyError):
            return None
        return [StandIn(parameter, joined)]

    def _states(self, state: State) -> list[Any]:
        """The parameters' state, which an optimizer mostly has in the same order: looking each up takes longer."""
        stop = self._first + len(self.parameters)
        if all(map(is_, islice(state, self._first, stop), self.parameters)) and stop <= len(state):
            return list(islice(state.values(), self._first, stop))
        self._first = next((n for n, parameter in enumerate(state) if parameter is self.parameters[0]), 0)
        return list(map(state.get, self.parameters))

    def _join(self, name: str, states: list[Any]) -> Tensor | None:
        shared = self.shared.get(name)
        if shared is None:
            return self._row(name).join(list(map(itemgetter(name), states)))
        return shared.value if shared.is_in(list(map(itemgetter(name), states))) else None

    def settle(self, stepped: Sequence[StandIn], state: State) -> None:
        """After a step: bring what is not shared memory to the parameters' own state."""
        (joined,) = stepped
        for name, value in joined.state.items():
            if joined.before.get(name) is not value:
                self.give(name, value, state)
            elif name in self.shared:
                self.shared[name] = self.shared[name].spread()
        torch.autograd.graph.increment_version(self.parameters)  # they have changed, each for itself

    def give(self, name: str, value: Any, state: State) -> None:
        """Make the parts of `value` the state `name` of the parameters."""
        parts: Iterable[Any]
        if isinstance(value, Tensor) and value.dim():
            parts = self.parts(value)
        elif isinstance(value, Tensor):
            shared = self.shared[name] = Shared.of(value, len(self.parameters))
            parts = shared.parts
        else:
            parts = [value] * len(self.parameters)
        for parameter, part in zip(self.parameters, parts, strict=True):
            state[parameter][name] = part
        if name not in self.names:
            self.names = (*self.names, name)

    def parts(self, flat: Tensor) -> Iterator[Tensor]:
        """The views of `flat`, 1-D, that belong to the parameters, in their shapes."""
        for parameter, start in zip(self.parameters, self.row.offsets, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)

    def gather(self, state: State) -> None:
        """Where the parameters' state is not one tensor yet, make it one, of which each has a view."""
        for name in self.names:
            tensors = [state[parameter][name] for parameter in self.parameters]
            if not tensors[0].dim():
                self.give(name, tensors[0].clone(), state)
            elif self._row(name).join(tensors) is None:
                flat = tensors[0].new_zeros(self.row.numel)
                for part, tensor in zip(self.parts(flat), tensors, strict=True):
                    part.copy_(tensor)
                self.give(name, flat, state)


def find_runs(parameters: Sequence[nn.Parameter], state: State) -> list[Run]:
    """The runs among `parameters`, which are original parameters, have gradients, and share their hyper-parameters."""
    solid = [parameter for parameter in parameters if parameter.numel()]
    numbers = _numbers(
        value
        for parameter in solid
        for value in (state.get(parameter) or {}).values()
        if type(value) is Tensor and value.dim() == 0
    )
    found = [_Piece.of(parameter, state, numbers) for parameter in solid]
    stretches = _stretches([piece for piece in found if piece is not None])
    return [
        Run.of([piece.parameter for piece in stretch], stretch[0].names)
        for stretch in stretches
        if len(stretch) > 1
    ]


@final
@attrs.frozen(eq=False)
class _Piece:
    """A parameter that can be part of a run, with its bytes `[start, stop)`."""

    parameter: nn.Parameter
    start: int
    stop: int
    handle: FlatParamHandle
    index: int
    """Its slot in the flat parameter."""
    distance: int
    """From its own bytes to those of its gradient."""
    names: tuple[str, ...]
    """Of its state."""
    likeness: Hashable
    """What it has in common with the parameters of its run: the kinds of its state tensors, and its numbers."""

    @classmethod
    def of(cls, parameter: nn.Parameter, state: State, numbers: Mapping[int, Hashable]) -> Self | None:
        """`None` where it has to be stepped as it is.

        Args:
            numbers: see `_numbers`.
        """
        owner, gradient, own = owner_of(parameter), parameter.grad, state.get(parameter) or {}
        if owner is None or type(parameter) is not nn.Parameter or type(gradient) is not Tensor:
            return None
        if parameter.dtype not in DTYPES or parameter.is_inference() or not alike(gradient, parameter):
            return None
        likeness: list[Hashable] = [parameter.dtype, parameter.device]
        for name, value in own.items():
            if type(value) is not Tensor:
                return None
            if value.dim() == 0:
                likeness.append((name, value.dtype, value.device, numbers[id(value)]))
            elif alike(value, parameter):
                likeness.append((name, value.dtype, value.device))
            else:
                return None
        start = parameter.data_ptr()
        stop = start + parameter.numel() * parameter.itemsize
        distance = gradient.data_ptr() - start
        return cls(parameter, start, stop, *owner, distance, tuple(own), tuple(likeness))

    def follows(self, before: _Piece) -> bool:
        """Whether nothing but padding lies between `before` and this."""
        return (
            self.handle is before.handle
            and self.distance == before.distance
            and self.start >= before.stop
            and before.index < self.index
            and not any(slot.span for slot in self.handle.layout.slots[before.index + 1 : self.index])
            and self.likeness == before.likeness
        )


def _numbers(values: Iterable[Tensor]) -> dict[int, Hashable]:
    """What tensors of one element hold, by `id`: they are read together, since each look at an accelerator waits."""
    alike: dict[Hashable, list[Tensor]] = {}
    for value in values:
        alike.setdefault((value.dtype, value.device), []).append(value)
    found: dict[int, Hashable] = {}
    for tensors in alike.values():
        found.update(zip(map(id, tensors), torch.stack(tensors).detach().tolist(), strict=True))
    return found


def _stretches(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces in stretches of at most `MAX_NUMEL` elements; a larger one is alone.

    The order is that of the pieces' handles, wherever the memory of each lies, so that it is the same in every run.
    """
    handles: dict[FlatParamHandle, list[_Piece]] = {}
    for piece in pieces:
        handles.setdefault(piece.handle, []).append(piece)
    stretches: list[list[_Piece]] = []
    for piece in chain.from_iterable(sorted(own, key=attrgetter("start")) for own in handles.values()):
        last = stretches[-1] if stretches else []
        nbytes = MAX_NUMEL.value * piece.parameter.itemsize
        if last and piece.follows(last[-1]) and piece.stop - last[0].start <= nbytes:
            last.append(piece)
        else:
            stretches.append([piece])
    return stretches
