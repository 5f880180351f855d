"""Checkpoints of sharded models, saved and loaded by all ranks together, and pretrained weights, read by all of them.

An add-on on the state layer and the files.
"""

from flatparam_checkpoint.checkpointer import Checkpointer, Optimizers
from flatparam_checkpoint.load import Loaded
from flatparam_checkpoint.pretrained import (
    Fit,
    Names,
    PretrainedFiles,
    PretrainedReport,
    UnreadTensor,
    fit,
    load_pretrained,
    read_pretrained,
)

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "Fit",
    "Loaded",
    "Names",
    "Optimizers",
    "PretrainedFiles",
    "PretrainedReport",
    "UnreadTensor",
    "fit",
    "load_pretrained",
    "read_pretrained",
]
