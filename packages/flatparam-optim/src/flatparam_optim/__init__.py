"""Optimizers that step whole matrices, however their parameters are sharded, and fewer tensors for ordinary ones.

Both have the numbers of one process. Each cut matrix is brought to the rank that owns it, stepped there, and its update
is sent back. See the guide `docs/guides/optimizers.md`.
"""

from flatparam_optim.adafactor import Adafactor, TransformersAdafactor
from flatparam_optim.matrices.matrix_owners import newton_schulz_flops
from flatparam_optim.matrices.members import WholeStep, drop_flat_gradients, follow_gradients, originals_in
from flatparam_optim.matrices.routes import Routes
from flatparam_optim.matrices.stepper import MatrixStepper
from flatparam_optim.matrix_step import MatrixOptimizer, MatrixStep
from flatparam_optim.muon import Muon
from flatparam_optim.segments.flat_steps import prepare_step, set_flat_steps, step_in_segments, tensors_stepped
from flatparam_optim.shampoo import Shampoo
from flatparam_optim.shape_rules import OptimizerKind, allow_shards, kind_of_optimizer, may_step_shards
from flatparam_optim.whole_optimizer import WholeOptimizer

__version__ = "0.1.0"

__all__ = [
    "Adafactor",
    "MatrixOptimizer",
    "MatrixStep",
    "MatrixStepper",
    "Muon",
    "OptimizerKind",
    "Routes",
    "Shampoo",
    "TransformersAdafactor",
    "WholeOptimizer",
    "WholeStep",
    "allow_shards",
    "drop_flat_gradients",
    "follow_gradients",
    "kind_of_optimizer",
    "may_step_shards",
    "newton_schulz_flops",
    "originals_in",
    "prepare_step",
    "set_flat_steps",
    "step_in_segments",
    "tensors_stepped",
]
