"""The tensors that a sharded module shows under its parameters' names."""

from flatparam_core.exposure.bindings import BoundParameter, ParamInfo, discover, each_module
from flatparam_core.exposure.flat import FlatExposure
from flatparam_core.exposure.freed import FreedParameter
from flatparam_core.exposure.original import OriginalExposure
from flatparam_core.exposure.owners import MARKS, clear_owner, handle_of, mark_owner, owner_of
from flatparam_core.exposure.protocol import Exposure, Faces

__all__ = [
    "BoundParameter",
    "Exposure",
    "Faces",
    "FlatExposure",
    "FreedParameter",
    "MARKS",
    "OriginalExposure",
    "ParamInfo",
    "clear_owner",
    "discover",
    "each_module",
    "handle_of",
    "mark_owner",
    "owner_of",
]
