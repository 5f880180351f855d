"""Names and files: model and optimizer state of sharded models, at any world size and under any wrapping."""

from flatparam_state.chunking import OWN_CHUNKER, Chunker
from flatparam_state.codec import fragment_of, fragments_of, gather, shard_of
from flatparam_state.forms import FormKind, StateForm
from flatparam_state.held import Held, Holding, held_parameters
from flatparam_state.model import StandIns, clean_keys, model_state_dict, state_shown
from flatparam_state.model_load import ModelLoad, load_model_state
from flatparam_state.optim_load import load_optimizer_state
from flatparam_state.optim_save import optimizer_state_dict
from flatparam_state.places import Place, places_in, places_of
from flatparam_state.tilings import Tiling, is_sharded_tensor
from flatparam_state.wanted import Streamed, Wanted, from_first

__version__ = "0.1.0"

__all__ = [
    "OWN_CHUNKER",
    "Chunker",
    "FormKind",
    "Held",
    "Holding",
    "ModelLoad",
    "Place",
    "StandIns",
    "StateForm",
    "Streamed",
    "Tiling",
    "Wanted",
    "clean_keys",
    "fragment_of",
    "fragments_of",
    "from_first",
    "gather",
    "held_parameters",
    "is_sharded_tensor",
    "load_model_state",
    "load_optimizer_state",
    "model_state_dict",
    "optimizer_state_dict",
    "places_in",
    "places_of",
    "shard_of",
    "state_shown",
]
