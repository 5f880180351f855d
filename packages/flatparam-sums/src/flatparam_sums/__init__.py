"""Sums of gradients that are right for unequal work: any rank may have any number of micro-batches, of any weight."""

from flatparam_sums.exact import ExactSums
from flatparam_sums.micro_batches import accumulate, reduce_gradients, uneven_inputs

__version__ = "0.1.0"

__all__ = ["ExactSums", "accumulate", "reduce_gradients", "uneven_inputs"]
