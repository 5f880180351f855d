"""The files of checkpoints as bytes: ranges that are read, writes that last, JSON, and safetensors."""

from flatparam_state.files.byte_file import ByteFile
from flatparam_state.files.disk import free_nbytes, replace_durably, sync_directory, write_durably
from flatparam_state.files.limited_json import parse_json
from flatparam_state.files.safetensors import (
    DTYPES,
    SafetensorsHeader,
    Staging,
    StoredTensor,
    TensorFileWriter,
    read_header,
)
from flatparam_state.files.tensor_bytes import buffer_of, bytes_view, tensor_of

__all__ = [
    "DTYPES",
    "SafetensorsHeader",
    "Staging",
    "StoredTensor",
    "TensorFileWriter",
    "read_header",
    "ByteFile",
    "free_nbytes",
    "buffer_of",
    "bytes_view",
    "parse_json",
    "replace_durably",
    "sync_directory",
    "tensor_of",
    "write_durably",
]
