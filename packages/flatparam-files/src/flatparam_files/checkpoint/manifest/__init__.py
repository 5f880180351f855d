"""The manifest of a checkpoint: its records, the values in it, and the file that shows every changed bit."""

from flatparam_files.checkpoint.manifest.fields import check_step, dtype_name, file_dtype
from flatparam_files.checkpoint.manifest.records import (
    BLOCK_NBYTES,
    FilePiece,
    FileRecord,
    RankValue,
    TensorRecord,
    rank_file,
)
from flatparam_files.checkpoint.manifest.sealed import read_sealed, seal, unseal, write_sealed
from flatparam_files.checkpoint.manifest.values import OMIT, decode, encode, graft, inline, reference
from flatparam_files.checkpoint.manifest.whole import EXTRA_STATE, MANIFEST, OF_RANKS, Manifest

__all__ = [
    "BLOCK_NBYTES",
    "EXTRA_STATE",
    "FileRecord",
    "MANIFEST",
    "Manifest",
    "OF_RANKS",
    "OMIT",
    "FilePiece",
    "RankValue",
    "TensorRecord",
    "check_step",
    "decode",
    "dtype_name",
    "encode",
    "file_dtype",
    "graft",
    "inline",
    "rank_file",
    "read_sealed",
    "reference",
    "seal",
    "unseal",
    "write_sealed",
]
