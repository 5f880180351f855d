"""The core's names in this package's signatures, and the functions that make or take such values.

Layers above import these names from here: a gather and a reduction work on `FlatParamHandle`s, which have a layout of
slots with spans and specs; a `Flattening` makes them from bound parameters. `tools/check_layers.py` refuses names that
these signatures do not lead to, but for the few that it lists with a reason.
"""

from flatparam_core import (
    FLAT_PARAM,
    BoundParameter,
    Box,
    BufferPool,
    FlatLayout,
    FlatParamError,
    FlatParameter,
    FlatParamHandle,
    Flattening,
    Fragment,
    FullForm,
    LayoutRule,
    ParamSpec,
    Precision,
    Residency,
    Span,
    Threshold,
    Transitions,
    all_thresholds,
    clean_fqn,
    discover,
    each_module,
    handle_of,
    memory_view,
    owner_of,
    warn_caller,
)

__all__ = [
    "BoundParameter",
    "Box",
    "BufferPool",
    "FLAT_PARAM",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParameter",
    "Flattening",
    "Fragment",
    "FullForm",
    "LayoutRule",
    "ParamSpec",
    "Precision",
    "Residency",
    "Span",
    "Threshold",
    "Transitions",
    "all_thresholds",
    "warn_caller",
    "clean_fqn",
    "discover",
    "each_module",
    "handle_of",
    "memory_view",
    "owner_of",
]
