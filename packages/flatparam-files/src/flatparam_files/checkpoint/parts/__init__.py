"""What each rank contributes to a checkpoint and writes, and the commit that makes one checkpoint of it."""

from flatparam_files.checkpoint.parts.commit import Committer, write_part
from flatparam_files.checkpoint.parts.contribution import (
    Contribution,
    OwnedPiece,
    Ticket,
    row_major_chunks,
    row_major_on_demand,
)
from flatparam_files.checkpoint.parts.report import report_path

__all__ = [
    "Committer",
    "Contribution",
    "OwnedPiece",
    "Ticket",
    "report_path",
    "row_major_chunks",
    "row_major_on_demand",
    "write_part",
]
