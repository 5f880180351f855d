"""Forward calls of a unit's module."""

from __future__ import annotations

import sys
from types import FrameType

import attrs
from torch import nn
from torch.autograd.graph import Node
from typing_extensions import final

__all__ = ["ForwardCall", "running_calls"]


@final
@attrs.define(eq=False)
class ForwardCall:
    """One call of a unit's module.

    Attributes:
        outer_error: the exception that was being handled when the call began; another one at its end is the call's own.
        is_recomputation: activation checkpointing runs the forward again inside the unit's own backward.
        is_top: the call is the outermost of its pass.
        stamp: the stamp of the unit's parameters with which it computes.
        inputs: for each input tensor with a gradient, the graph node that will compute it, and its token.
    """

    outer_error: BaseException | None
    is_recomputation: bool = False
    is_top: bool = False
    inputs: dict[object, Node] = attrs.field(factory=dict)
    stamp: int = 0


def running_calls(module: nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    code = nn.Module._call_impl.__code__
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
