"""The older home of the names of checkpoints, which the add-ons flatparam-checkpoint and flatparam-files have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam_runtime import names_of

if TYPE_CHECKING:
    from flatparam_checkpoint import *  # noqa: F403
    from flatparam_files import *  # noqa: F403

_MOVED = {
    "flatparam_checkpoint": "Checkpointer Loaded Optimizers",
    "flatparam_files": """
        CheckpointError CheckpointReader CheckpointWriter Moment OnMoment Verification open_checkpoint verify_checkpoint
    """,
}
__all__: list[str] = []
__all__ += " ".join(_MOVED.values()).split()
__getattr__ = names_of(_MOVED, __name__)
