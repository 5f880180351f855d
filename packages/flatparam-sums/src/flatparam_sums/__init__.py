"""Sums of gradients that are right for unequal work: any rank may have any number of micro-batches, of any weight."""

from flatparam_sums.exact import ExactSums, carriage
from flatparam_sums.micro_batches import accumulate, reduce_gradients, uneven_inputs
from flatparam_sums.residuals import load_residuals, save_residuals
from flatparam_sums.wire import Wire

__version__ = "0.1.0"

__all__ = [
    "ExactSums",
    "Wire",
    "accumulate",
    "carriage",
    "load_residuals",
    "reduce_gradients",
    "save_residuals",
    "uneven_inputs",
]
