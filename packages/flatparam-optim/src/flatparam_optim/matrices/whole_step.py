"""The seam to a rule that steps whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["Settings", "StateOf", "WholeStep"]

Settings: TypeAlias = "Mapping[str, Any]"
"""The hyper-parameters of a parameter group."""
StateOf: TypeAlias = "MutableMapping[str, Any]"
"""The optimizer's state of one parameter, by name."""


class WholeStep(Protocol):
    """A rule that steps parameters as wholes, in three parts: on each rank's part, on the whole, on each part again."""

    @property
    def streams(self) -> int:
        """How many tensors travel to the owner for each parameter."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether `step` keeps state with the owner, which then is a rank that holds elements of the parameter."""
        ...

    @property
    def part_states(self) -> frozenset[str]:
        """The names of the states that `prepare` makes on each rank that holds a part; others are the owner's alone."""
        ...

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes in which tensors travel to the owner and back, of a parameter of `dtype`."""
        ...

    def cost(self, shape: Sequence[int], settings: Settings) -> int:
        """The cost of `step` for a parameter of `shape`, in a unit of the rule's own."""
        ...

    def prepare(self, part: Tensor, gradient: Tensor, state: StateOf, settings: Settings) -> Sequence[Tensor]:
        """The tensors that have to travel: `streams` of them, shaped like `part`, this rank's part of the parameter.

        `state` is that of the part; what is shaped like the part belongs there.
        """
        ...

    def step(self, whole: Sequence[Tensor], state: StateOf, settings: Settings) -> Tensor:
        """The update of the whole parameter, on its owner.

        A rule that keeps no state may be called with zeros for a parameter without a gradient; its update is dropped.

        Args:
            whole: what `prepare` returned, in the parameter's shape and strides; may be changed.
            state: the same that `prepare` gets on this rank.
            settings: the hyper-parameters.
        """
        ...

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Settings) -> None:
        """Change this rank's part of the parameter by its part of the update, of the same shape.

        Args:
            part: to be changed.
            update: in the dtype in which it has travelled.
            shape: that of the whole parameter.
            settings: the hyper-parameters.
        """
        ...
