"""What an optimizer steps in place of parameters: tensors of another length over the same memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import attrs
import torch
from torch import Tensor
from typing_extensions import final

from flatparam_comm import Threshold

__all__ = ["DTYPES", "MAX_NUMEL", "StandIn", "State", "Substitution", "alike"]

State: TypeAlias = "MutableMapping[Tensor, dict[str, Any]]"
"""An optimizer's: for each parameter, its state tensors by name."""

MAX_NUMEL: Final = Threshold(
    "runtime.step_numel",
    1 << 18,
    "An optimizer steps neighbours as one tensor of up to so many elements, and a longer one on the CPU in pieces.",
)
"""Elements of a tensor that is stepped, at most: the temporaries of a step still fit into a cache, and what a step
costs beside its elements is lost among them."""

DTYPES: Final = (torch.float32, torch.float64)
"""Of these a vector instruction rounds like its scalar twin, so that it does not matter where a tensor ends."""


@final
@attrs.frozen(eq=False)
class StandIn:
    """A tensor as an optimizer steps it: `parameter` with its `.grad`, and its state."""

    parameter: Tensor
    before: Mapping[str, Tensor]
    """Its state before the step."""
    state: dict[str, Any] = attrs.field()

    @state.default
    def _copy(self) -> dict[str, Any]:
        return dict(self.before)


class Substitution(Protocol):
    """Parameters that are stepped as something else."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Whose place it takes."""
        ...

    def stand_ins(self, state: State) -> list[StandIn] | None:
        """What to step, with the parts of `state`; `None` where it cannot be done any more."""
        ...

    def settle(self, stepped: Sequence[StandIn], state: State) -> None:
        """After a step: bring what is not shared memory to the parameters' own state."""
        ...


def alike(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the elements of `tensor` lie as those of `parameter` do."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype == parameter.dtype
        and tensor.shape == parameter.shape
        and tensor.is_contiguous()
        and parameter.is_contiguous()
    )
