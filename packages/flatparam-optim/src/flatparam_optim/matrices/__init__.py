"""Steps of whole matrices: each cut one is brought to the rank that owns it, and its update is sent back."""

from flatparam_optim.matrices.matrix_owners import newton_schulz_flops
from flatparam_optim.matrices.members import WholeStep, drop_flat_gradients, follow_gradients, originals_in
from flatparam_optim.matrices.routes import Routes
from flatparam_optim.matrices.stepper import MatrixStepper

__all__ = [
    "MatrixStepper",
    "Routes",
    "WholeStep",
    "drop_flat_gradients",
    "follow_gradients",
    "newton_schulz_flops",
    "originals_in",
]
