"""One forward pass, and the handlers of the forward hooks."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd.graph import Node
from typing_extensions import final

from flatparam_comm import Residency
from flatparam_runtime.order import ForwardOrder, next_forward
from flatparam_runtime.phases import Phase
from flatparam_runtime.unit import Unit

__all__ = ["ForwardCall", "ForwardPass", "enter_forward", "in_backward", "leave_forward"]


@final
@attrs.define(eq=False)
class ForwardPass:
    """What is true while the outermost unit's forward call runs."""

    top: Unit
    order: ForwardOrder = attrs.field(factory=ForwardOrder)


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


def in_backward() -> bool:
    """Whether this thread is inside a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def enter_forward(unit: Unit) -> ForwardCall:
    """Have the unit's full parameters in place for a forward call that begins now."""
    tree = unit.tree
    assert tree is not None, "hooks grow the tree first"
    backward = tree.backward  # clears away a pass that died
    call = ForwardCall(sys.exc_info()[1])
    if unit.phase is Phase.BACKWARD and backward is not None:
        call.is_recomputation = True
        unit.calls.append(call)
        return call
    if unit.calls and _running_calls(unit.module) < len(unit.calls) + 1:
        tree.recover()  # an interrupt ended a pass without a word
    if tree.forward is None and not in_backward():
        tree.begin_forward(unit)
        call.is_top = True
    unit.calls.append(call)
    if unit.phase is not Phase.FORWARD:
        if unit.phase is Phase.REDUCING and backward is not None:
            backward.settle_until(unit)
        unit.move(Phase.FORWARD)
    unit.begin_unshard()
    if tree.forward is not None and not in_backward():
        _prefetch(unit)
    unit.finish_unshard()
    return call


def _prefetch(unit: Unit) -> None:
    tree = unit.tree
    if tree is None or tree.forward is None:
        return
    tree.forward.order.began.append(unit)
    depth = unit.plan.prefetch.forward
    if depth and tree.last_forward is not None:
        for ahead in next_forward(tree.last_forward.order.began, tree.forward.order.began, depth):
            if ahead.phase is Phase.IDLE:
                ahead.begin_unshard()


def leave_forward(unit: Unit, call: ForwardCall, *, failed: bool, recorded: bool, watched: bool) -> None:
    """Free the unit's full parameters where its plan says so.

    Args:
        failed: the call raised.
        recorded: autograd was recording.
        watched: an output was found whose gradient will announce the unit's backward.
    """
    tree = unit.tree
    assert tree is not None, "a call that was entered has a tree"
    if call.is_recomputation:
        return
    if not unit.calls:
        unit.move(Phase.IDLE)
        if failed or not _keeps_full_parameters(unit, call, recorded, watched):
            unit.reshard()
    if tree.forward is not None and not in_backward():
        tree.forward.order.ended.append(unit)
    if call.is_top:
        if failed:
            tree.recover()
        else:
            _drop_unused_prefetches(unit)
            tree.end_forward()


def _keeps_full_parameters(unit: Unit, call: ForwardCall, recorded: bool, watched: bool) -> bool:
    if in_backward():
        return True  # a recomputation for a backward that comes at once
    if not recorded:
        return False  # no backward follows, and the next pass may come after a step of the optimizer
    if not watched and unit.trainable:
        return True  # the outputs hide their tensors: nothing would gather the parameters again for their backward
    return call.is_top or not unit.plan.free_after_forward


def _drop_unused_prefetches(top: Unit) -> None:
    assert top.tree is not None
    for unit in top.tree.units:
        if unit.residency is Residency.UNSHARDING and unit.phase is Phase.IDLE:
            unit.reshard()


def _running_calls(module: nn.Module) -> int:
    """How many calls of ``module`` are on this thread's stack."""
    code = nn.Module._call_impl.__code__
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count


def result_of_exception(call: ForwardCall, output: Any) -> bool:
    """Whether an always-called forward hook was called because the module raised."""
    return output is None and sys.exc_info()[1] is not call.outer_error
