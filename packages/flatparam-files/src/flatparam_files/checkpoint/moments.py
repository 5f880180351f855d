"""The points of the protocol at which a test can look, fail or die."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Moment", "OnMoment", "nothing"]


class Moment(enum.Enum):
    """A point of a save, named by what has just happened; they come in this order.

    `FILE_OPENED` to `REPORTED` happen on every rank, the others on rank 0.
    """

    LOCKED = "the directory is locked"
    CLEANED = "what dead saves left is gone"
    PREPARED = "the temporary directory is there"
    FILE_OPENED = "the rank's file is there, empty"
    PIECE_WRITTEN = "one more piece is in the rank's file"
    FILE_SYNCED = "the rank's file is on the disk"
    REPORTED = "the rank has reported"
    MANIFEST_WRITTEN = "the manifest is on the disk"
    TEMPORARY_SYNCED = "the names in the temporary directory are on the disk"
    RENAMED = "the directory has its final name"
    COMMITTED = "the final name is on the disk"
    LATEST_WRITTEN = "the new `latest` is on the disk, under another name"
    LATEST_REPLACED = "`latest` names the new checkpoint"
    RETIRING = "an old checkpoint has lost its name"
    RETIRED = "an old checkpoint is gone"


OnMoment: TypeAlias = Callable[[Moment], None]
"""Is called at each moment; what it raises counts as a failure there."""


def nothing(moment: Moment) -> None:
    """Do nothing: the `OnMoment` outside of tests."""
