"""Pickles, read and written without importing or running what they name."""

from flatparam_files.formats.pickles.reader import AdmittedNames, Global, InertObject, is_key, read_pickle
from flatparam_files.formats.pickles.writer import Persistent, PickledCall, pickle_of

__all__ = [
    "AdmittedNames",
    "Global",
    "InertObject",
    "Persistent",
    "PickledCall",
    "is_key",
    "pickle_of",
    "read_pickle",
]
