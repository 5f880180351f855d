"""A long tensor on the CPU that an optimizer steps in pieces.

A step of `torch.optim` goes over a tensor a dozen times, and writes temporaries of its length. Of a piece all of that
stays in the cache; of the whole each pass goes to memory, and the temporaries' pages are asked of the system anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import final

from flatparam_comm import FlatParameter, Threshold, owner_of
from flatparam_runtime.optimizers.stand_in import DTYPES, MAX_NUMEL, StandIn, State, alike

__all__ = ["Pieces", "can_be_cut", "is_long"]

GRAIN: Final = Threshold(
    "runtime.thread_grain_numel",
    1 << 15,
    "Pieces of a step have at least so many elements for each thread, if that is more than `runtime.step_numel`.",
    least=0,
)
"""Elements that torch gives to one thread at least (at::internal::GRAIN_SIZE)."""


def is_long(parameter: nn.Parameter) -> bool:
    """Whether it belongs to a unit, and is stepped in pieces where it can be."""
    return (
        (isinstance(parameter, FlatParameter) or owner_of(parameter) is not None)
        and parameter.is_cpu
        and parameter.dtype in DTYPES
        and parameter.numel() > _piece_numel()
    )


def can_be_cut(parameter: nn.Parameter, state: State) -> bool:
    """Whether a long parameter can be stepped in pieces now: it has a gradient, and state from an earlier step."""
    gradient, own = parameter.grad, state.get(parameter) or {}
    return (
        len(own) > 0
        and type(gradient) is Tensor
        and alike(gradient, parameter)
        and not parameter.is_inference()
        and all(type(v) is Tensor and (v.dim() == 0 or alike(v, parameter)) for v in own.values())
    )


def _piece_numel() -> int:
    """Elements of a piece: every thread has something to do."""
    return max(MAX_NUMEL.value, torch.get_num_threads() * GRAIN.value)


@final
@attrs.frozen(eq=False)
class Pieces:
    """One parameter, and the tensors that are stepped in its place: each a part of it, of its gradient and its state.

    Numbers of its state, such as its count of steps, are copied for each piece: equal before a step, and after it.
    """

    parameter: nn.Parameter

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The one."""
        return (self.parameter,)

    def stand_ins(self, state: State) -> list[StandIn] | None:
        """See `Substitution.stand_ins`."""
        if not can_be_cut(self.parameter, state):
            return None
        numel = _piece_numel()
        parameters = torch.split(self.parameter.detach().view(-1), numel)
        columns = {
            name: self._cut(value, numel, len(parameters)) for name, value in state[self.parameter].items()
        }
        assert self.parameter.grad is not None, "it has just been looked at"
        gradients = torch.split(self.parameter.grad.view(-1), numel)
        rows: Any = zip(*columns.values(), strict=True)
        made = []
        for parameter, gradient, row in zip(parameters, gradients, rows, strict=True):
            parameter.grad = gradient
            made.append(StandIn(parameter, dict(zip(columns, row, strict=True))))
        return made

    @staticmethod
    def _cut(value: Tensor, numel: int, count: int) -> Sequence[Tensor]:
        if value.dim():
            return torch.split(value.view(-1), numel)
        return value.repeat(count).unbind()

    def settle(self, stepped: Sequence[StandIn], state: State) -> None:
        """See `Substitution.settle`."""
        # Where the step was broken off, the first piece is the one that has come furthest.
        own, first = state[self.parameter], stepped[0].state
        for name, value in first.items():
            if not isinstance(value, Tensor):
                own[name] = value
            elif value.dim() == 0 and isinstance(own.get(name), Tensor):
                own[name].copy_(value)
            elif value is not stepped[0].before.get(name) and all(name in each.state for each in stepped):
                parts = [each.state[name] for each in stepped]
                own[name] = torch.cat(parts).view(self.parameter.shape) if value.dim() else value
