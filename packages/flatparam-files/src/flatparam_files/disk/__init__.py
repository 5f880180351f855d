"""The files of checkpoints as bytes: ranges that are read, writes that last, JSON, and safetensors."""

from flatparam_files.disk.byte_file import AnyPath, ByteFile, unreadable
from flatparam_files.disk.errors import CheckpointError, UnreadableError
from flatparam_files.disk.limited_json import check_cost, parse_json
from flatparam_files.disk.limits import (
    MAX_DIMS,
    MAX_INTEGER_BITS,
    MAX_MANIFEST_NBYTES,
    MAX_PUBLISHED_NBYTES,
    allowed_nbytes,
    is_short_integer,
)
from flatparam_files.disk.safetensors import (
    DTYPES,
    SafetensorsHeader,
    Staging,
    StoredTensor,
    TensorFileWriter,
    read_header,
)
from flatparam_files.disk.source import (
    CHUNK_NBYTES,
    Source,
    TensorInfo,
    chunk_spans,
    join_path,
    renamed,
    split_path,
)
from flatparam_files.disk.system import (
    OPEN_FILES,
    ReopenedFile,
    free_nbytes,
    make_directory,
    new_file,
    open_regular,
    replace_durably,
    sync_directory,
    sync_file,
    write_durably,
)
from flatparam_files.disk.tensor_bytes import buffer_of, bytes_view, tensor_of

__all__ = [
    "AnyPath",
    "ByteFile",
    "CHUNK_NBYTES",
    "CheckpointError",
    "DTYPES",
    "MAX_DIMS",
    "MAX_INTEGER_BITS",
    "MAX_MANIFEST_NBYTES",
    "MAX_PUBLISHED_NBYTES",
    "OPEN_FILES",
    "ReopenedFile",
    "SafetensorsHeader",
    "Source",
    "Staging",
    "StoredTensor",
    "TensorFileWriter",
    "TensorInfo",
    "UnreadableError",
    "allowed_nbytes",
    "buffer_of",
    "bytes_view",
    "check_cost",
    "chunk_spans",
    "free_nbytes",
    "is_short_integer",
    "join_path",
    "make_directory",
    "new_file",
    "renamed",
    "open_regular",
    "parse_json",
    "read_header",
    "replace_durably",
    "split_path",
    "sync_directory",
    "sync_file",
    "tensor_of",
    "unreadable",
    "write_durably",
]
