"""How optimizers step flat parameters."""

from flatparam_runtime.optimizers.clip import clip_grad_norm_, clip_gradients_
from flatparam_runtime.optimizers.in_backward import acts_in_backward, check_in_backward_optimizers, step_in_backward
from flatparam_runtime.optimizers.stepping import StepPreparation, note_step_of, notice_optimizers
from flatparam_runtime.optimizers.torch_optimizers import COUNTERS, part_states_of

__all__ = [
    "acts_in_backward",
    "COUNTERS",
    "StepPreparation",
    "check_in_backward_optimizers",
    "clip_grad_norm_",
    "clip_gradients_",
    "note_step_of",
    "notice_optimizers",
    "part_states_of",
    "step_in_backward",
]
