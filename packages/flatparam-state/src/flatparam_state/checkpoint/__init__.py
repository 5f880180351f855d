"""The checkpoint directory: every rank writes what it owns, a manifest says what is where, a rename makes it true."""

from flatparam_files import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    Moment,
    OnMoment,
    Verification,
    open_checkpoint,
    verify_checkpoint,
)
from flatparam_state.checkpoint.checkpointer import Checkpointer, Optimizers
from flatparam_state.checkpoint.load import Loaded

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
