"""Optimizers that step whole matrices, however their parameters are sharded: exact, with the numbers of one process.

See the guide `docs/guides/optimizers.md`.
"""

from flatparam.optim.adafactor import Adafactor
from flatparam.optim.matrix_step import MatrixOptimizer, MatrixStep
from flatparam.optim.muon import Muon
from flatparam.optim.shampoo import Shampoo
from flatparam.optim.transformers_adafactor import TransformersAdafactor

__all__ = ["Adafactor", "MatrixOptimizer", "MatrixStep", "Muon", "Shampoo", "TransformersAdafactor"]
