"""The names of the core that this package's signatures are made of, and what makes or takes such values.

Whoever builds on this package gets them from here: a gather and a reduction are of `FlatParamHandle`s, which have a
layout of slots with spans and specs; they are made of bound parameters by a `Flattening`. Nothing else is passed on,
and `tools/check_layers.py` sees to it.
"""

from flatparam_core import (
    FLAT_PARAM,
    BoundParameter,
    BufferPool,
    FlatLayout,
    FlatParamError,
    FlatParameter,
    FlatParamHandle,
    Flattening,
    Fragment,
    FullForm,
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
    memory_view,
    owner_of,
)

__all__ = [
    "BoundParameter",
    "BufferPool",
    "FLAT_PARAM",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParameter",
    "Flattening",
    "Fragment",
    "FullForm",
    "ParamSpec",
    "Precision",
    "Residency",
    "Span",
    "Threshold",
    "Transitions",
    "all_thresholds",
    "clean_fqn",
    "discover",
    "each_module",
    "memory_view",
    "owner_of",
]
