"""An ordinary `torch.optim` optimizer steps tensors of the best length, whatever parameters it has.

An optimizer that steps neighbours in a shard, or a long parameter on the CPU, steps segments in their place from then
on (`plan`). Any other steps its parameters, such as short flat ones, as it always did. The runtime calls `prepare_step`
before each step, by the entry point `steps` of `flatparam.optimizers`.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import optim

from flatparam_comm import FlatParameter, owner_of
from flatparam_optim.segments.divided import is_long
from flatparam_optim.segments.plan import SegmentStepper
from flatparam_optim.segments.segment import STEP_NUMEL
from flatparam_runtime.optimizers.torch_optimizers import INIT_GROUP, STEPS

__all__ = ["prepare_step", "set_flat_steps", "step_in_segments", "tensors_stepped"]

STEPS_EACH: Final = "_flatparam_steps_each"
"""Our mark on an optimizer that may not step segments."""


def set_flat_steps(optimizer: optim.Optimizer, enabled: bool) -> None:
    """Say whether `optimizer` may step neighbours as one tensor, and long ones in pieces; it may unless told not to.

    The numbers are the same either way.
    """
    setattr(optimizer, STEPS_EACH, not enabled)


def tensors_stepped(optimizer: optim.Optimizer) -> int | None:
    """The number of tensors that the last step of `optimizer` updated; `None` if it steps each parameter by itself."""
    stepper = vars(optimizer).get(INIT_GROUP)
    return stepper.count if isinstance(stepper, SegmentStepper) else None


def step_in_segments(optimizer: optim.Optimizer) -> None:
    """Step an optimizer of `torch.optim` that is a part of another one, without the hooks that torch has around a step.

    It steps neighbours as one tensor, and long parameters in pieces, as one by itself does.

    Args:
        optimizer: of a class that treats each element alone.
    """
    if not torch.compiler.is_compiling():
        prepare_step(optimizer)
    STEPS[type(optimizer)](optimizer)


def prepare_step(optimizer: optim.Optimizer) -> None:
    """Have an optimizer that is about to step do so in segments, if it may and has to gain by it."""
    if type(optimizer) not in STEPS:
        return
    own = vars(optimizer)
    stepper = own.get(INIT_GROUP)
    if own.get(STEPS_EACH, False):
        if isinstance(stepper, SegmentStepper):
            del own[INIT_GROUP]
    elif isinstance(stepper, SegmentStepper):
        stepper.count = 0
    elif stepper is None and _has_to_gain(optimizer):
        own[INIT_GROUP] = SegmentStepper(weakref.ref(optimizer))


def _has_to_gain(optimizer: optim.Optimizer) -> bool:
    """Whether it has several original parameters in a group, or a long parameter of any kind."""
    limit = STEP_NUMEL.value
    for group in optimizer.param_groups:
        has_several = len(group["params"]) > 1
        for parameter in group["params"]:
            if not isinstance(parameter, FlatParameter):
                if owner_of(parameter) is None:
                    continue
                if has_several:
                    return True
            if parameter.numel() > limit and is_long(parameter):
                return True
    return False
