"""Checkpoints of sharded models, saved and loaded by all ranks together, and pretrained weights, read by all of them.

An add-on on the state layer and the files.
"""

from flatparam_checkpoint.checkpointer import Checkpointer
from flatparam_checkpoint.keys import Optimizers
from flatparam_checkpoint.load.load_session import Loaded
from flatparam_checkpoint.pretrained.files import Fit, Names, PretrainedFiles, fit
from flatparam_checkpoint.pretrained.loading import PretrainedReport, load_pretrained
from flatparam_checkpoint.pretrained.read import read_pretrained
from flatparam_checkpoint.pretrained.unread import UnreadTensor

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
