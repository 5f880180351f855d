"""The checkpoint directory: every rank writes what it owns, a manifest says what is where, a rename makes it true."""

from flatparam_state.checkpoint.checkpointer import Checkpointer, Optimizers
from flatparam_state.checkpoint.load import Loaded
from flatparam_state.checkpoint.protocol import Moment, OnMoment
from flatparam_state.checkpoint.reader import CheckpointReader, open_checkpoint
from flatparam_state.checkpoint.verify import Verification, verify_checkpoint
from flatparam_state.checkpoint.writer import CheckpointWriter
from flatparam_state.files import CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "Checkpointer",
    "Loaded",
    "Moment",
    "OnMoment",
    "Optimizers",
    "Verification",
    "open_checkpoint",
    "verify_checkpoint",
]
