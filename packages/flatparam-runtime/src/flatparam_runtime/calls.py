"""One forward call of a unit's module."""

from __future__ import annotations

import attrs
from torch.autograd.graph import Node
from typing_extensions import final

__all__ = ["ForwardCall"]


@final
@attrs.define(eq=False)
class ForwardCall:
    """One call of a unit's module.

    Attributes:
        outer_error: the exception that was being handled when the call began; another one at its end is the call's own.
        is_recomputation: activation checkpointing runs the forward again inside the unit's own backward.
        is_top: the call is the outermost of its pass.
        inputs: for each input tensor with a gradient, the graph node that will compute it, and its token.
    """

    outer_error: BaseException | None
    is_recomputation: bool = False
    is_top: bool = False
    inputs: dict[object, Node] = attrs.field(factory=dict)
