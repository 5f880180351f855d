"""The memory of a flat parameter: the full parameters, the gradients, and the pool that keeps freed memory."""

from flatparam_core.storage.buffer import BufferPool, FlatBuffer
from flatparam_core.storage.full_form import FullForm, FullForms, kind_of
from flatparam_core.storage.gradients import GradientLedger, add_to_grad
from flatparam_core.storage.precision import Precision
from flatparam_core.storage.residency import RESIDENCY, Residency
from flatparam_core.storage.shard import Shard, give_data

__all__ = [
    "BufferPool",
    "FlatBuffer",
    "FullForm",
    "FullForms",
    "GradientLedger",
    "Precision",
    "RESIDENCY",
    "Residency",
    "Shard",
    "add_to_grad",
    "give_data",
    "kind_of",
]
