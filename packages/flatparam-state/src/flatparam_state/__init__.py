"""Names and files: model and optimizer state of sharded models, at any world size and under any wrapping."""

from flatparam_state.codec import fragment_of, fragments_of, gather, shard_of
from flatparam_state.model import clean_keys, full_state_shown, model_state_dict
from flatparam_state.model_load import FullLoad, load_model_state
from flatparam_state.optim_load import load_optimizer_state
from flatparam_state.optim_save import optimizer_state_dict
from flatparam_state.places import Place, places_in, places_of

__version__ = "0.1.0"

__all__ = [
    "FullLoad",
    "Place",
    "clean_keys",
    "fragment_of",
    "fragments_of",
    "full_state_shown",
    "gather",
    "load_model_state",
    "load_optimizer_state",
    "model_state_dict",
    "optimizer_state_dict",
    "places_in",
    "places_of",
    "shard_of",
]
