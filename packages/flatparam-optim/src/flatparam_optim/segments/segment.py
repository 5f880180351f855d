"""A segment: what an optimizer steps in place of parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Threshold

__all__ = ["DTYPES", "STEP_NUMEL", "Segment", "State", "SteppedTensor", "is_like"]

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
    state: dict[str, Any] = attrs.field()
    """The state as the step leaves it."""

    @state.default
    def _copy(self) -> dict[str, Any]:
        return dict(self.before)


class Segment(Protocol):
    """A segment is a span of a group's parameters that an optimizer steps as tensors of a different length."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters in the segment, which the optimizer does not step themselves."""
        ...

    def tensors(self, state: State) -> list[SteppedTensor] | None:
        """Make the tensors to step, over the memory of the parameters, of their gradients and of their `state`.

        Returns:
            `None` if memory or state is no longer as it was when the segment was made.
        """
        ...

    def settle(self, stepped: Sequence[SteppedTensor], state: State) -> None:
        """After a step, copy to the parameters' own `state` whatever does not share its memory."""
        ...


def is_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the elements of `tensor` lie as those of `parameter` do."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype == parameter.dtype
        and tensor.shape == parameter.shape
        and tensor.is_contiguous()
        and parameter.is_contiguous()
    )
