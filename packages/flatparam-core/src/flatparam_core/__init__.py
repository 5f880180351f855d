"""Flat parameters on one rank: geometry, storage, views and gradients. It never imports `torch.distributed`."""

from flatparam_core.errors import FlatParamError, IllegalStepError, LayoutError
from flatparam_core.exposure import (
    BoundParameter,
    Exposure,
    FlatExposure,
    OriginalExposure,
    ParamInfo,
    discover,
    each_module,
)
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.flatten import (
    ALIGNMENT_NBYTES,
    CPU_ALIGNMENT_NBYTES,
    Flattening,
    RuleOf,
    flatten_module,
)
from flatparam_core.geometry import (
    ELEMENT,
    ROW,
    WHOLE,
    FlatLayout,
    FlatParamShardMetadata,
    Fragment,
    LayoutRule,
    Location,
    Move,
    ParamSpec,
    Place,
    Slot,
    Span,
    Unflattened,
    block_of,
    memory_view,
    plan_layouts,
    replan,
    shard_metadata,
)
from flatparam_core.handle import FlatParamHandle
from flatparam_core.holders import handle_of, owner_of
from flatparam_core.names import FLAT_PARAM, FSDP_WRAPPED_MODULE, PRESENTER, clean_fqn
from flatparam_core.storage import (
    BufferPool,
    FlatBuffer,
    FullForm,
    GradientLedger,
    Precision,
    Residency,
    give_data,
)
from flatparam_core.thresholds import Threshold, all_thresholds
from flatparam_core.transitions import Transitions
from flatparam_core.warned import warn_caller

__version__ = "0.1.0"

__all__ = [
    "ALIGNMENT_NBYTES",
    "ELEMENT",
    "CPU_ALIGNMENT_NBYTES",
    "FLAT_PARAM",
    "FSDP_WRAPPED_MODULE",
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
    "warn_caller",
]
