"""Names and files: model and optimizer state of sharded models, at any world size and under any wrapping."""

from flatparam_state.checkpoint import (
    Checkpointer,
    CheckpointReader,
    CheckpointWriter,
    Loaded,
    Moment,
    OnMoment,
    Optimizers,
    Verification,
    open_checkpoint,
    verify_checkpoint,
)
from flatparam_state.codec import fragment_of, fragments_of, gather, shard_of
from flatparam_state.errors import CheckpointError
from flatparam_state.files.safetensors.header import DTYPES, SafetensorsHeader, StoredTensor, read_header
from flatparam_state.files.safetensors.stream import Staging, TensorFileWriter
from flatparam_state.formats import (
    FORMATS,
    Soundness,
    UnknownFormatError,
    cast_model,
    open_source,
    select,
    verify_source,
    watch,
    write_checkpoint,
    write_dcp,
    write_hugging_face,
    write_torch_file,
)
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker
from flatparam_state.forms.deferred import Streamed, as_tensor, from_first, is_tensor_like, shape_of
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.forms.tiling import Tiling, is_sharded_tensor
from flatparam_state.forms.wanted import Wanted
from flatparam_state.model.collect import StandIns, clean_keys, model_state_dict, state_shown
from flatparam_state.model.load import ModelLoad, load_model_state
from flatparam_state.optimizer.collect import optimizer_state_dict
from flatparam_state.optimizer.held import Held, Holding, held_parameters
from flatparam_state.optimizer.load import load_optimizer_state
from flatparam_state.places import Place, places_in, places_of
from flatparam_state.source import CHUNK_NBYTES, Source, TensorInfo, chunk_spans, join_path, split_path
from flatparam_state.version import __version__ as __version__

__all__ = [
    "CHUNK_NBYTES",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "Checkpointer",
    "Chunker",
    "DTYPES",
    "FORMATS",
    "FormKind",
    "Held",
    "Holding",
    "Loaded",
    "ModelLoad",
    "Moment",
    "OWN_CHUNKER",
    "OnMoment",
    "Optimizers",
    "Place",
    "SafetensorsHeader",
    "Soundness",
    "Source",
    "Staging",
    "StandIns",
    "StateForm",
    "StoredTensor",
    "Streamed",
    "TensorFileWriter",
    "TensorInfo",
    "Tiling",
    "UnknownFormatError",
    "Verification",
    "Wanted",
    "as_tensor",
    "cast_model",
    "chunk_spans",
    "clean_keys",
    "fragment_of",
    "fragments_of",
    "from_first",
    "gather",
    "held_parameters",
    "is_sharded_tensor",
    "is_tensor_like",
    "join_path",
    "load_model_state",
    "load_optimizer_state",
    "model_state_dict",
    "open_checkpoint",
    "open_source",
    "optimizer_state_dict",
    "places_in",
    "places_of",
    "read_header",
    "select",
    "shape_of",
    "shard_of",
    "split_path",
    "state_shown",
    "verify_checkpoint",
    "verify_source",
    "watch",
    "write_checkpoint",
    "write_dcp",
    "write_hugging_face",
    "write_torch_file",
]
