"""The protocol of a checkpoint directory: its names, its lock, its moments, and the verdict that all ranks share."""

from flatparam_state.checkpoint.protocol.agreement import (
    Attempt,
    Failure,
    agree,
    agree_on_call,
    attempt,
    raise_first,
)
from flatparam_state.checkpoint.protocol.directory import (
    CheckpointDirectory,
    read_manifest,
)
from flatparam_state.checkpoint.protocol.lock import (
    DirectoryLock,
)
from flatparam_state.checkpoint.protocol.moments import (
    Moment,
    OnMoment,
    nothing,
)

__all__ = [
    "Attempt",
    "CheckpointDirectory",
    "DirectoryLock",
    "Failure",
    "Moment",
    "OnMoment",
    "agree",
    "agree_on_call",
    "attempt",
    "nothing",
    "raise_first",
    "read_manifest",
]
