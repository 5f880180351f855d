"""A segment: what an optimizer steps in place of parameters; and one that is a long parameter on the CPU, in pieces."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import FlatParameter, Threshold, owner_of

State: TypeAlias = "MutableMapping[Tensor, dict[str, Any]]"
"""The state of an optimizer: for each parameter, its state tensors by name."""

STEP_NUMEL: Final = Threshold(
    "runtime.step_numel",
    1 << 18,
    "An optimizer steps neighbours as one tensor of up to so many elements, and a longer one on the CPU in pieces.",
)
"""The elements of a stepped tensor, at most: the temporaries of a step still fit into a cache, and the cost of a step
beside its elements is lost among them."""

DTYPES: Final = (torch.float32, torch.float64)
"""In these dtypes a vector instruction rounds like its scalar twin, so that it does not matter where a tensor ends."""


@final
@attrs.frozen(eq=False)
class SteppedTensor:
    """A stepped tensor is a part of a segment that the optimizer steps as one: a tensor with its `.grad` and state."""

    parameter: Tensor
    before: Mapping[str, Tensor]
    """The state before the step."""
    state: dict[str, Any] = attrs.Factory(lambda self: dict(self.before), takes_self=True)
    """The state as the step leaves it."""


class Segment(Protocol):
    """A segment is a span of a group's parameters that an optimizer steps as tensors of a different length."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters in the segment, which the optimizer does not step themselves."""

    def tensors(self, state: State) -> list[SteppedTensor] | None:
        """Make the tensors to step, over the memory of the parameters, of their gradients and of their `state`.

        Returns:
            `None` if memory or state is no longer as it was when the segment was made.
        """

    def settle(self, stepped: Sequence[SteppedTensor], state: State) -> None:
        """After a step, copy to the parameters' own `state` whatever does not share its memory."""


def is_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether the elements of `tensor` lie as those of `parameter` do."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype == parameter.dtype
        and tensor.shape == parameter.shape
        and tensor.is_contiguous()
        and parameter.is_contiguous()
    )


# A segment that is one long parameter on the CPU, in pieces.
#
# A step of `torch.optim` goes over a tensor a dozen times, and writes temporaries of its length. All of that stays in
# the cache for a piece; for the whole, each pass goes to memory, and the system is asked for the temporaries' pages
# anew.


THREAD_GRAIN: Final = Threshold(
    "runtime.thread_grain_numel",
    1 << 15,
    "Pieces of a step have at least so many elements for each thread, if that is more than `runtime.step_numel`.",
    least=0,
)
"""The elements that torch gives to one thread at least (at::internal::GRAIN_SIZE)."""


def is_long(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` belongs to a unit, and is stepped in pieces if it can be."""
    return (
        (isinstance(parameter, FlatParameter) or owner_of(parameter) is not None)
        and parameter.is_cpu
        and parameter.dtype in DTYPES
        and parameter.numel() > _piece_numel()
    )


def can_be_divided(parameter: nn.Parameter, state: State) -> bool:
    """Whether a long parameter can be stepped in pieces now: it has a gradient, and state from an earlier step."""
    gradient, own = parameter.grad, state.get(parameter) or {}
    return (
        len(own) > 0
        and type(gradient) is Tensor
        and is_like(gradient, parameter)
        and not parameter.is_inference()
        and all(type(v) is Tensor and (v.dim() == 0 or is_like(v, parameter)) for v in own.values())
    )


def _piece_numel() -> int:
    """Return the elements of a piece, which are enough for every thread to have something to do."""
    return max(STEP_NUMEL.value, torch.get_num_threads() * THREAD_GRAIN.value)


@final
@attrs.frozen(eq=False)
class DividedSegment:
    """A divided segment is one parameter that is stepped in pieces, each with its part of the gradient and the state.

    The numbers in its state, such as its count of steps, are copied for each piece: the copies are equal before a step,
    and after it.
    """

    parameter: nn.Parameter

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameter, alone."""
        return (self.parameter,)

    def tensors(self, state: State) -> list[SteppedTensor] | None:
        """Make the pieces; `None` if the parameter or its state is not as it was."""
        if not can_be_divided(self.parameter, state):
            return None
        numel = _piece_numel()
        parameters = torch.split(self.parameter.detach().view(-1), numel)
        columns = {name: self._divide(value, numel, len(parameters)) for name, value in state[self.parameter].items()}
        assert self.parameter.grad is not None, "it has just been looked at"
        gradients = torch.split(self.parameter.grad.view(-1), numel)
        rows: Any = zip(*columns.values(), strict=True)
        pieces = []
        for parameter, gradient, row in zip(parameters, gradients, rows, strict=True):
            parameter.grad = gradient
            pieces.append(SteppedTensor(parameter, dict(zip(columns, row, strict=True))))
        return pieces

    @staticmethod
    def _divide(value: Tensor, numel: int, count: int) -> Sequence[Tensor]:
        if value.dim():
            return torch.split(value.view(-1), numel)
        return value.repeat(count).unbind()

    def settle(self, stepped: Sequence[SteppedTensor], state: State) -> None:
        """Take the state from the pieces."""
        # If the step was interrupted, the first piece is the one that has come furthest.
        own, first = state[self.parameter], stepped[0].state
        for name, value in first.items():
            if not isinstance(value, Tensor):
                own[name] = value
            elif value.dim() == 0 and isinstance(own.get(name), Tensor):
                own[name].copy_(value)
            elif value is not stepped[0].before.get(name) and all(name in each.state for each in stepped):
                pieces = [each.state[name] for each in stepped]
                own[name] = torch.cat(pieces).view(self.parameter.shape) if value.dim() else value
