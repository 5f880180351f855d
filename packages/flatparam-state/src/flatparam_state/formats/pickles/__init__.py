"""Pickles, read and written without importing or running what they name."""

from flatparam_state.formats.pickles.reader import AdmittedNames, Global, InertObject, read_pickle
from flatparam_state.formats.pickles.writer import Persistent, PickledCall, pickle_of

__all__ = ["AdmittedNames", "Global", "InertObject", "Persistent", "PickledCall", "pickle_of", "read_pickle"]
