"""The older home of the names of checkpoints, which the add-ons flatparam-checkpoint and flatparam-files have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam_runtime import names_of

if TYPE_CHECKING:
    from flatparam_checkpoint import Checkpointer, Loaded, Optimizers
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

_ON_RANKS = ("Checkpointer", "Loaded", "Optimizers")
__getattr__ = names_of(
    {"flatparam_checkpoint": _ON_RANKS, "flatparam_files": set(__all__).difference(_ON_RANKS)}, __name__
)
