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
from flatparam_state.model import clean_keys, full_state_shown, model_state_dict
from flatparam_state.model_load import FullLoad, load_model_state
from flatparam_state.optim_load import load_optimizer_state
from flatparam_state.optim_save import optimizer_state_dict
from flatparam_state.places import Place, places_in, places_of
from flatparam_state.source import CHUNK_NBYTES, Source, TensorInfo, chunk_spans, join_path, split_path
from flatparam_state.tensor_file import (
    DTYPES,
    SafetensorsHeader,
    Staging,
    StoredTensor,
    TensorFileWriter,
    read_header,
)

__version__ = "0.1.0"

__all__ = [
    "CHUNK_NBYTES",
    "DTYPES",
    "FORMATS",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "Checkpointer",
    "FullLoad",
    "Loaded",
    "Moment",
    "OnMoment",
    "Optimizers",
    "Place",
    "SafetensorsHeader",
    "Soundness",
    "Source",
    "Staging",
    "StoredTensor",
    "TensorFileWriter",
    "TensorInfo",
    "UnknownFormatError",
    "Verification",
    "cast_model",
    "chunk_spans",
    "clean_keys",
    "fragment_of",
    "fragments_of",
    "full_state_shown",
    "gather",
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
    "shard_of",
    "split_path",
    "verify_checkpoint",
    "verify_source",
    "watch",
    "write_checkpoint",
    "write_dcp",
    "write_hugging_face",
    "write_torch_file",
]
