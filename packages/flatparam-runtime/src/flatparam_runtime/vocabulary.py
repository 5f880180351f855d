"""The names of the layers beneath that this package's signatures are made of, and what makes or takes such values.

A unit has flat parameters and a topology of groups; its plan is made of both. Nothing else is passed on, and
`tools/check_layers.py` sees to it.
"""

from flatparam_comm import (
    FLAT_PARAM,
    Collectives,
    CommHooks,
    FlatParamError,
    FlatParamHandle,
    Fragment,
    HookStage,
    ParamSpec,
    SingleCollectives,
    Span,
    Threshold,
    Topology,
    all_thresholds,
    broadcast_tensors,
    clean_fqn,
    gradient_divisors,
    memory_view,
    process_group_of,
    resolve_topology,
)

__all__ = [
    "Collectives",
    "CommHooks",
    "FLAT_PARAM",
    "FlatParamError",
    "FlatParamHandle",
    "Fragment",
    "HookStage",
    "ParamSpec",
    "SingleCollectives",
    "Span",
    "Threshold",
    "Topology",
    "all_thresholds",
    "broadcast_tensors",
    "clean_fqn",
    "gradient_divisors",
    "memory_view",
    "process_group_of",
    "resolve_topology",
]
