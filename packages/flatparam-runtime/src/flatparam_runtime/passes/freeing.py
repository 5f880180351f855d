"""The moments at which full parameters may be freed, and the one function that decides whether they are."""

from __future__ import annotations

import enum

from flatparam_comm import Residency
from flatparam_runtime.passes.record import ForwardPass
from flatparam_runtime.unit import ForwardCall, Phase, Unit


class Juncture(enum.Enum):
    """A moment of a pass at which a unit's full parameters may go."""

    PASS_BEGINS = "a forward pass begins"
    CALL_ENDED = "a forward call of the unit is over"
    READER_ENDED = "a forward call of a unit that borrows from it is over"
    LOAN_ENDED = "a forward call has read a parameter of it, and nobody uses that"
    FORWARD_ENDED = "a forward pass is over"
    COMPLETE = "the unit is complete in a backward pass, or autograd has computed every gradient"


def may_free(
    unit: Unit,
    moment: Juncture,
    call: ForwardCall | None = None,
    around: ForwardPass | None = None,
    is_next: bool = False,
    is_kept: bool = False,
) -> bool:
    """Return whether the full parameters of `unit` may go.

    | moment | they stay if |
    | --- | --- |
    | PASS_BEGINS | nobody has changed the shards, and a caller holds them, or gradients were or are not synchronised |
    | CALL_ENDED | a backward pass is under way: the gradients of a recomputation come at once |
    | | the call was recorded, and its unit is expected to be first in backward (`is_next`) |
    | | another call or a context uses them, or the call has returned one of them, and has not failed |
    | | the call was recorded, and its outputs hide their tensors: no hook would gather them again |
    | | the call was recorded, and the plan keeps them after a forward call, or those of the outermost unit |
    | | the call was not recorded, and is inside a recorded one, and the plan keeps them: a reentrant checkpoint |
    | READER_ENDED | another call or a context uses them, or the call has returned one, or the unit is in a phase |
    | | the pass is recorded, and the plan keeps them, or the outputs of the call hide their tensors |
    | LOAN_ENDED | another call or a context uses them, or the unit is in a phase, or the plan keeps them |
    | FORWARD_ENDED | they are used, or a caller holds them: only those that were gathered in vain go |
    | COMPLETE | a unit that borrows them is active (`is_kept`) |
    | | gradients are not synchronised, and the plan keeps them then |

    Args:
        call: the forward call that is over.
        around: the forward pass around it.
    """
    plan = unit.plan
    if moment is Juncture.COMPLETE:
        return not is_kept and (unit.reducer.synchronises or plan.free_after_unsynced_backward)
    if moment is Juncture.PASS_BEGINS:
        return unit.is_stale or not (is_kept or unit.showing.are_held) or unit.was_given_data
    if moment is Juncture.FORWARD_ENDED:
        is_idle = unit.residency is Residency.UNSHARDING and unit.phase is Phase.IDLE
        return is_idle and not unit.showing.are_held
    if moment is Juncture.LOAN_ENDED:
        return plan.free_after_forward and unit.phase is Phase.IDLE and not unit.is_needed
    assert call is not None, "the other moments are those after a call"
    if moment is Juncture.READER_ENDED:
        if unit in call.returned or unit.phase is not Phase.IDLE or unit.is_needed:
            return False
        is_inference = around is not None and not around.recorded
        return is_inference or (plan.free_after_forward and (call.watched or not call.recorded))
    if call.in_backward or (call.recorded and is_next):
        return False
    if call.failed:
        return True
    if unit.is_needed or unit in call.returned:
        return False
    if not call.recorded:
        # In a recorded pass the call is a reentrant checkpoint, whose recomputation needs the parameters again.
        return plan.free_after_forward or call.is_top or around is None or not around.recorded
    if not call.watched and (unit.trainable or call.inputs):
        return False
    return plan.free_after_forward and not (call.is_top and plan.keeps_outermost)


def free(
    unit: Unit,
    moment: Juncture,
    call: ForwardCall | None = None,
    around: ForwardPass | None = None,
    is_next: bool = False,
    is_kept: bool = False,
    is_computed: bool = False,
) -> bool:
    """Free the full parameters of `unit`, if there are any and they may go; arguments as `may_free` and `Unit.reshard`.

    Returns:
        Whether none are left.
    """
    if unit.gather is None:
        return True
    may = may_free(unit, moment, call, around, is_next, is_kept)
    if may:
        unit.reshard(is_computed=is_computed)
    return may
