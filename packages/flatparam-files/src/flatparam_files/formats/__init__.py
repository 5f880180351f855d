"""Checkpoints in the formats of other programs: opened as sources, written from sources, a piece at a time."""

from flatparam_files.disk.source import read_boxes
from flatparam_files.formats.hugging_face import INDEX_FILE, divided, encode_index
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.stored.stored_tensors import (
    Storage,
    Stored,
    StridedTensor,
    row_major,
)
from flatparam_files.formats.stored.whole_sources import StoredSource

__all__ = [
    "INDEX_FILE",
    "SparseFile",
    "Storage",
    "Stored",
    "StoredSource",
    "StridedTensor",
    "appearing",
    "check_new",
    "divided",
    "encode_index",
    "read_boxes",
    "row_major",
]
