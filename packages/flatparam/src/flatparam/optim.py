"""Optimizers that step whole matrices, however their parameters are sharded: the names of the add-on flatparam-optim.

See the guide `docs/guides/optimizers.md`.
"""

from typing import TYPE_CHECKING

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_optim import Adafactor, MatrixOptimizer, MatrixStep, Muon, Shampoo, TransformersAdafactor

__all__ = ["Adafactor", "MatrixOptimizer", "MatrixStep", "Muon", "Shampoo", "TransformersAdafactor"]

__getattr__ = lazily(__name__, {"flatparam_optim": __all__})
