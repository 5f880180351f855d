"""How optimizers step flat parameters, and which are refused."""

from flatparam_runtime.optimizers.clip import clip_grad_norm_, clip_gradients_
from flatparam_runtime.optimizers.in_backward import acts_in_backward, check_in_backward_optimizers, step_in_backward
from flatparam_runtime.optimizers.shape_rules import OptimizerKind, allow_shards, kind_of_optimizer
from flatparam_runtime.optimizers.stepping import (
    COUNTERS,
    StepPreparation,
    note_step_of,
    notice_optimizers,
    part_states_of,
)

__all__ = [
    "acts_in_backward",
    "COUNTERS",
    "OptimizerKind",
    "StepPreparation",
    "allow_shards",
    "check_in_backward_optimizers",
    "clip_grad_norm_",
    "clip_gradients_",
    "kind_of_optimizer",
    "note_step_of",
    "notice_optimizers",
    "part_states_of",
    "step_in_backward",
]
