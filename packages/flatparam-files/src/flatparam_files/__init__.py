"""The files of sharded models on the core alone: checkpoints read, written, verified and converted, without ranks.

The names are imported at the first use of one, so that the command can answer without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flatparam_core import Box
    from flatparam_files.checkpoint.directory import Moment, OnMoment
    from flatparam_files.checkpoint.reader import CheckpointReader, open_checkpoint
    from flatparam_files.checkpoint.soundness import Soundness, Verification, verify_checkpoint
    from flatparam_files.checkpoint.writer import CheckpointWriter
    from flatparam_files.disk.checkpoint_error import CheckpointError, UnreadableError
    from flatparam_files.disk.limits import without_collector
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
        row_major_boxes,
        split_path,
    )
    from flatparam_files.formats.dcp_writer import write_dcp
    from flatparam_files.formats.detect import FORMATS, UnknownFormatError, open_source, verify_source
    from flatparam_files.formats.hugging_face import write_hugging_face
    from flatparam_files.formats.own_checkpoint import write_checkpoint
    from flatparam_files.formats.torch_files import write_torch_file
    from flatparam_files.formats.whole_sources import averages_as_model, cast_model, select, watch

__version__ = "0.1.0"

__all__ = [
    "Box",
    "CHUNK_NBYTES",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "DTYPES",
    "FORMATS",
    "Moment",
    "OnMoment",
    "SafetensorsHeader",
    "Soundness",
    "Source",
    "Staging",
    "StoredTensor",
    "TensorFileWriter",
    "TensorInfo",
    "UnknownFormatError",
    "UnreadableError",
    "Verification",
    "averages_as_model",
    "cast_model",
    "chunk_spans",
    "join_path",
    "open_checkpoint",
    "open_source",
    "read_header",
    "row_major_boxes",
    "select",
    "split_path",
    "verify_checkpoint",
    "verify_source",
    "watch",
    "without_collector",
    "write_checkpoint",
    "write_dcp",
    "write_hugging_face",
    "write_torch_file",
]

_HOMES: Final = (
    "checkpoint.directory",
    "checkpoint.reader",
    "checkpoint.soundness",
    "checkpoint.writer",
    "disk.checkpoint_error",
    "disk.limits",
    "disk.safetensors",
    "disk.source",
    "formats.dcp_writer",
    "formats.detect",
    "formats.hugging_face",
    "formats.own_checkpoint",
    "formats.whole_sources",
    "formats.torch_files",
)


def __getattr__(name: str) -> Any:
    """Import the modules that have the public names; after the first of them, all are here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        module = importlib.import_module(f"{__name__}.{home}")
        globals().update({each: getattr(module, each) for each in __all__ if hasattr(module, each)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
