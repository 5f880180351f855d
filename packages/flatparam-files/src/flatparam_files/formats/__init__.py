"""Checkpoints in the formats of other programs: opened as sources, written from sources, a piece at a time."""

from flatparam_files.checkpoint.soundness import Soundness
from flatparam_files.formats.dcp.dcp_reader import open_dcp
from flatparam_files.formats.dcp.dcp_writer import write_dcp
from flatparam_files.formats.deepspeed import open_deepspeed
from flatparam_files.formats.detect import FORMATS, UnknownFormatError, open_source
from flatparam_files.formats.hugging_face import (
    INDEX_FILE,
    divided,
    encode_index,
    open_hugging_face,
    write_hugging_face,
)
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.own_checkpoint import write_checkpoint
from flatparam_files.formats.stored import (
    Storage,
    Stored,
    StoredSource,
    StridedTensor,
    averages_as_model,
    cast_model,
    read_boxes,
    row_major,
    select,
    watch,
)
from flatparam_files.formats.torch_files import open_torch_file, write_torch_file
from flatparam_files.formats.verify import verify_source

__all__ = [
    "FORMATS",
    "INDEX_FILE",
    "Soundness",
    "SparseFile",
    "Storage",
    "Stored",
    "StoredSource",
    "StridedTensor",
    "UnknownFormatError",
    "appearing",
    "averages_as_model",
    "cast_model",
    "check_new",
    "divided",
    "encode_index",
    "open_dcp",
    "open_deepspeed",
    "open_hugging_face",
    "open_source",
    "open_torch_file",
    "read_boxes",
    "row_major",
    "select",
    "verify_source",
    "watch",
    "write_checkpoint",
    "write_dcp",
    "write_hugging_face",
    "write_torch_file",
]
