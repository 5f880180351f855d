"""Checkpoints in the formats of other programs: opened as sources, written from sources, a piece at a time."""

from flatparam_state.formats.dcp.reader import open_dcp
from flatparam_state.formats.dcp.writer import write_dcp
from flatparam_state.formats.deepspeed.reader import open_deepspeed
from flatparam_state.formats.detect import FORMATS, UnknownFormatError, open_source
from flatparam_state.formats.hugging_face.model_files import open_hugging_face, write_hugging_face
from flatparam_state.formats.own import write_checkpoint
from flatparam_state.formats.stored import averages_as_model, cast_model, select, watch
from flatparam_state.formats.torch_save import open_torch_file, write_torch_file
from flatparam_state.formats.verify import verify_source
from flatparam_state.soundness import Soundness

__all__ = [
    "FORMATS",
    "Soundness",
    "UnknownFormatError",
    "averages_as_model",
    "cast_model",
    "open_dcp",
    "open_deepspeed",
    "open_hugging_face",
    "open_source",
    "open_torch_file",
    "select",
    "verify_source",
    "watch",
    "write_checkpoint",
    "write_dcp",
    "write_hugging_face",
    "write_torch_file",
]
