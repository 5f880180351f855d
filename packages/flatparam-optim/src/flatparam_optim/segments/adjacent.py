"""The search for parameters that lie side by side in a shard, which an optimizer can step as joined segments."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import FlatParamHandle, owner_of
from flatparam_optim.segments.joined import JoinedSegment
from flatparam_optim.segments.segment import DTYPES, STEP_NUMEL, State, is_like

__all__ = ["join_adjacent"]


def join_adjacent(parameters: Sequence[nn.Parameter], state: State) -> list[JoinedSegment]:
    """The joined segments among `parameters`, which have gradients, and share their hyper-parameters.

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
        """Whether nothing but padding lies between `before` and this parameter."""
        return (
            self.handle is before.handle
            and self.distance == before.distance
            and self.start >= before.stop
            and before.index < self.index
            and not any(slot.span for slot in self.handle.layout.slots[before.index + 1 : self.index])
            and self.likeness == before.likeness
        )


def _numbers(values: Iterable[Tensor]) -> dict[int, Hashable]:
    """The numbers in tensors of one element, by `id`, read together, since each look at an accelerator waits."""
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
