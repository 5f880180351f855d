"""Flat parameters on one rank: geometry, storage, views and gradients. It never imports `torch.distributed`."""

from flatparam_core.errors import FlatParamError, IllegalStepError, LayoutError
from flatparam_core.exposure.bindings import BoundParameter, ParamInfo, discover, each_module, memory_view
from flatparam_core.exposure.flat import FlatExposure
from flatparam_core.exposure.original import OriginalExposure
from flatparam_core.exposure.protocol import Exposure
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.flatten import ORIGINAL_ALIGNMENT_NBYTES, Flattening, RuleOf, flatten_module
from flatparam_core.geometry.layout import FlatLayout, Fragment, Slot
from flatparam_core.geometry.metadata import FlatParamShardMetadata, shard_metadata
from flatparam_core.geometry.replan import Location, Move, Place, replan
from flatparam_core.geometry.rules import ELEMENT, ROW, WHOLE, LayoutRule, block_of
from flatparam_core.geometry.spans import Span
from flatparam_core.geometry.specs import ParamSpec
from flatparam_core.geometry.unflattened import Unflattened
from flatparam_core.geometry.unit_layouts import plan_layouts
from flatparam_core.handle import FlatParamHandle, handle_of, owner_of
from flatparam_core.names import FLAT_PARAM, FSDP_WRAPPED_MODULE, PRESENTER, clean_fqn
from flatparam_core.storage.buffer import BufferPool, FlatBuffer
from flatparam_core.storage.full_form import FullForm
from flatparam_core.storage.gradients import GradientLedger
from flatparam_core.storage.precision import Precision
from flatparam_core.storage.residency import Residency
from flatparam_core.tensor_data import give_data
from flatparam_core.thresholds import Threshold, all_thresholds
from flatparam_core.transitions import Transitions

__version__ = "0.1.0"

__all__ = [
    "ELEMENT",
    "FLAT_PARAM",
    "FSDP_WRAPPED_MODULE",
    "ORIGINAL_ALIGNMENT_NBYTES",
    "PRESENTER",
    "ROW",
    "WHOLE",
    "BoundParameter",
    "BufferPool",
    "Exposure",
    "FlatBuffer",
    "FlatExposure",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "Flattening",
    "Fragment",
    "FullForm",
    "GradientLedger",
    "IllegalStepError",
    "LayoutError",
    "LayoutRule",
    "Location",
    "Move",
    "OriginalExposure",
    "ParamInfo",
    "ParamSpec",
    "Place",
    "Precision",
    "Residency",
    "RuleOf",
    "Slot",
    "Span",
    "Threshold",
    "Transitions",
    "Unflattened",
    "all_thresholds",
    "block_of",
    "clean_fqn",
    "discover",
    "each_module",
    "flatten_module",
    "give_data",
    "handle_of",
    "memory_view",
    "owner_of",
    "plan_layouts",
    "replan",
    "shard_metadata",
]
