"""The files of checkpoints as bytes: ranges that are read, writes that last, JSON, and safetensors."""

from flatparam_state.files.byte_file import (
    ByteFile,
)
from flatparam_state.files.disk import (
    free_nbytes,
    open_regular,
    replace_durably,
    sync_directory,
    write_durably,
)
from flatparam_state.files.errors import (
    CheckpointError,
)
from flatparam_state.files.limited_json import (
    parse_json,
)
from flatparam_state.files.safetensors import (
    DTYPES,
    SafetensorsHeader,
    Staging,
    StoredTensor,
    TensorFileWriter,
    read_header,
)
from flatparam_state.files.source import (
    CHUNK_NBYTES,
    Source,
    TensorInfo,
    chunk_spans,
    join_path,
    split_path,
)
from flatparam_state.files.tensor_bytes import (
    buffer_of,
    bytes_view,
    tensor_of,
)

__all__ = [
    "ByteFile",
    "CHUNK_NBYTES",
    "CheckpointError",
    "DTYPES",
    "SafetensorsHeader",
    "Source",
    "Staging",
    "StoredTensor",
    "TensorFileWriter",
    "TensorInfo",
    "buffer_of",
    "bytes_view",
    "chunk_spans",
    "free_nbytes",
    "join_path",
    "open_regular",
    "parse_json",
    "read_header",
    "replace_durably",
    "split_path",
    "sync_directory",
    "tensor_of",
    "write_durably",
]
