"""The checkpoint directory without ranks: its names, lock and manifest, its reader and writer, and each rank's part."""

from flatparam_files.checkpoint.commit import Committer, write_part
from flatparam_files.checkpoint.contribution import (
    Contribution,
    OwnedPiece,
    Ticket,
    report_path,
    row_major_chunks,
    row_major_on_demand,
)
from flatparam_files.checkpoint.directory import CheckpointDirectory, read_manifest
from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.checkpoint.manifest import (
    EXTRA_STATE,
    MANIFEST,
    OF_RANKS,
    Manifest,
    RankValue,
    TensorRecord,
    check_step,
    encode,
    inline,
    reference,
    seal,
    unseal,
)
from flatparam_files.checkpoint.moments import Moment, OnMoment, nothing
from flatparam_files.checkpoint.reader import CheckpointReader, deletion_of, open_checkpoint, what_it_says
from flatparam_files.checkpoint.soundness import Verification, verify_checkpoint
from flatparam_files.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointDirectory",
    "CheckpointReader",
    "CheckpointWriter",
    "Committer",
    "Contribution",
    "DirectoryLock",
    "EXTRA_STATE",
    "MANIFEST",
    "Manifest",
    "Moment",
    "OF_RANKS",
    "OnMoment",
    "OwnedPiece",
    "RankValue",
    "TensorRecord",
    "Ticket",
    "Verification",
    "check_step",
    "deletion_of",
    "encode",
    "inline",
    "nothing",
    "open_checkpoint",
    "read_manifest",
    "reference",
    "report_path",
    "row_major_chunks",
    "row_major_on_demand",
    "seal",
    "unseal",
    "verify_checkpoint",
    "what_it_says",
    "write_part",
]
