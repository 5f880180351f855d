"""The state of a sharded model, under the names that the unsharded model has."""

from flatparam_state.model.collect import StandIns, clean_keys, model_state_dict, state_shown
from flatparam_state.model.load import ModelLoad, load_model_state, refused_anywhere

__all__ = [
    "ModelLoad",
    "StandIns",
    "clean_keys",
    "load_model_state",
    "model_state_dict",
    "refused_anywhere",
    "state_shown",
]
