"""The beginning and the end of a unit's forward call."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import nn

from flatparam_comm import Residency, Threshold
from flatparam_runtime.autograd import in_backward, profiled
from flatparam_runtime.passes.order import ForwardPass, next_forward
from flatparam_runtime.passes.tree import UnitTree
from flatparam_runtime.unit.calls import ForwardCall, running_calls
from flatparam_runtime.unit.phases import Phase
from flatparam_runtime.unit.unit import Unit

__all__ = ["enter_forward", "is_of_exception", "leave_forward"]

PREFETCH_NBYTES: Final = Threshold(
    "runtime.prefetch_nbytes",
    2**22,
    "On an accelerator one unit is gathered ahead, and more if all of them have at most so many bytes together.",
)


def enter_forward(tree: UnitTree, unit: Unit, module: nn.Module) -> ForwardCall:
    """Have the unit's full parameters in place for a forward call of `module` that begins now."""
    # The property drops an interrupted pass.
    backward = tree.backward
    # This pass was interrupted too, but autograd's own threads have not freed it yet.
    if backward is not None and not in_backward():
        tree.recover()
        backward = None
    call = ForwardCall(sys.exc_info()[1], module)
    if unit.phase is Phase.BACKWARD and backward is not None:
        call.is_recomputation = True
        unit.held.begin_call(call)
        return call
    # A pass was interrupted, and no hook was called.
    if unit.calls and _was_interrupted(unit, module):
        tree.recover()
    if tree.forward is None and not in_backward():
        tree.begin_forward()
        call.is_top = True
    call.full_precision = unit.computes_in_full_precision
    unit.shed(full_precision=call.full_precision)
    if unit.phase is not Phase.FORWARD:
        if unit.phase is Phase.REDUCING and backward is not None:
            backward.settle_until(unit)
        unit.move(Phase.FORWARD)
    unit.held.begin_call(call)
    unit.begin_unshard(full_precision=call.full_precision)
    call.stamp = unit.gathered
    if tree.forward is not None and not in_backward():
        _prefetch(tree, tree.forward, unit)
    unit.finish_unshard()
    return call


def _was_interrupted(unit: Unit, module: nn.Module) -> bool:
    """Whether some call that the unit has recorded is not on the stack any more; a call of `module` begins now."""
    known = collections.Counter(call.module for call in unit.calls)
    known[module] += 1
    return any(running_calls(called) < count for called, count in known.items())


@profiled("_pre_forward_prefetch")
def _prefetch(tree: UnitTree, current: ForwardPass, unit: Unit) -> None:
    current.begin(unit)
    depth = unit.plan.prefetch.forward
    ahead: Iterable[Unit] = ()
    if unit.links.forward_prefetch is not None:
        ahead = unit.links.forward_prefetch
    elif tree.streams.runs_ahead and depth != 0:
        ahead = _as_many_as_fit(tree.to_come(unit), depth or 1)
    elif depth and tree.last_forward is not None:
        ahead = next_forward(tree.last_forward.began, current.began, depth)
    for other in ahead:
        if other.phase is Phase.IDLE:
            other.begin_unshard(full_precision=other.computes_in_full_precision)


def _as_many_as_fit(units: Iterable[Unit], least: int) -> Iterator[Unit]:
    """The first `least` of `units`, and more of them as long as all together are small."""
    waiting = 0
    for count, unit in enumerate(units):
        waiting += unit.unsharded_nbytes
        if count >= least and waiting > PREFETCH_NBYTES.value:
            return
        yield unit


def leave_forward(
    tree: UnitTree, unit: Unit, call: ForwardCall, *, failed: bool, recorded: bool, watched: bool
) -> None:
    """Free the unit's full parameters if its plan says so.

    Args:
        failed: the call raised.
        recorded: autograd was recording.
        watched: every output whose gradient may announce the unit's backward was found.
    """
    if call.is_recomputation:
        return
    if failed and call.is_top:
        tree.recover()
        return
    if not unit.calls:
        unit.move(Phase.IDLE)
        for lender in unit.lenders:
            if not lender.is_needed and lender.phase is Phase.IDLE and lender.plan.free_after_forward:
                lender.reshard()
        # A recomputation stops early, with an exception, as soon as it has what it needs; the gradients come at once.
        keeps = in_backward() or (
            not failed and _keeps_full_parameters(tree.forward, unit, call, recorded, watched)
        )
        if not keeps and not (recorded and _is_first_of_backward(tree, unit)):
            unit.reshard()
    if tree.forward is not None and not in_backward():
        tree.forward.ended.append(unit)
    if call.is_top:
        _drop_unused_prefetches(tree)
        tree.end_forward()


def _keeps_full_parameters(
    around: ForwardPass | None, unit: Unit, call: ForwardCall, recorded: bool, watched: bool
) -> bool:
    if unit.is_needed:
        return True
    if not recorded:
        # If no recorded pass is around the call, no backward follows, and the next pass may come after an optimizer's
        # step. In a recorded pass the call is a reentrant checkpoint, whose recomputation needs the parameters again.
        return around is not None and around.recorded and not call.is_top and not unit.plan.free_after_forward
    # The outputs hide their tensors: no hook would gather the parameters again for their backward.
    if not watched and (unit.trainable or call.inputs):
        return True
    return call.is_top or not unit.plan.free_after_forward


def _is_first_of_backward(tree: UnitTree, unit: Unit) -> bool:
    """Whether `unit` is expected to be the first in backward.

    It is if all but the outermost unit have ended, and this pass is like the one before.
    """
    if not unit.plan.keeps_last or tree.forward is None or in_backward():
        return False
    # Only the number of units counts: ranks that diverge must still issue the same collectives, so that all detect it.
    return len(tree.forward.ended) == tree.calls_before - 2


def _drop_unused_prefetches(tree: UnitTree) -> None:
    for unit in tree.units:
        if unit.residency is Residency.UNSHARDING and unit.phase is Phase.IDLE:
            unit.reshard()


def is_of_exception(call: ForwardCall, output: Any) -> bool:
    """Whether an always-called forward hook was called because the module raised."""
    return output is None and sys.exc_info()[1] is not call.outer_error
