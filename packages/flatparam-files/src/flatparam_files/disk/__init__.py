"""The files of checkpoints as bytes: ranges that are read, writes that last, JSON, and safetensors."""

from flatparam_files.disk.limits import MAX_PUBLISHED_NBYTES, parse_json
from flatparam_files.disk.source import filled, renamed
from flatparam_files.disk.system import (
    AnyPath,
    ByteFile,
    bytes_view,
    free_nbytes,
    make_directory,
    new_file,
    open_regular,
)

__all__ = [
    "AnyPath",
    "ByteFile",
    "MAX_PUBLISHED_NBYTES",
    "bytes_view",
    "filled",
    "free_nbytes",
    "make_directory",
    "new_file",
    "open_regular",
    "parse_json",
    "renamed",
]
