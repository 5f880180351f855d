"""The checkpoint directory without ranks: its names, lock and manifest, its reader and writer, and each rank's part."""

from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.directory import CheckpointDirectory, nothing, read_manifest
from flatparam_files.checkpoint.fields import check_step, seal, unseal
from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.checkpoint.manifest import (
    EXTRA_STATE,
    MANIFEST,
    OF_RANKS,
    Manifest,
    RankValue,
    TensorRecord,
)
from flatparam_files.checkpoint.rank_part import (
    RankFileWriter,
    RankReport,
    Ticket,
    report_path,
)
from flatparam_files.checkpoint.reader import deletion_of, what_it_says
from flatparam_files.checkpoint.values import encode, inline, reference

__all__ = [
    "CheckpointDirectory",
    "Committer",
    "DirectoryLock",
    "EXTRA_STATE",
    "MANIFEST",
    "Manifest",
    "OF_RANKS",
    "RankFileWriter",
    "RankReport",
    "RankValue",
    "TensorRecord",
    "Ticket",
    "check_step",
    "deletion_of",
    "encode",
    "inline",
    "nothing",
    "read_manifest",
    "reference",
    "report_path",
    "seal",
    "unseal",
    "what_it_says",
]
