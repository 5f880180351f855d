"""The names of lower layers that occur in this package's signatures, and the functions that make or take such values.

A unit has flat parameters and a topology of groups; its plan is made of both. No other name is re-exported;
`tools/check_layers.py` checks this.
"""

from flatparam_comm import (
    FLAT_PARAM,
    Collectives,
    CommError,
    CommHooks,
    ExchangesValues,
    FlatParamError,
    FlatParamHandle,
    Fragment,
    HookStage,
    ParamSpec,
    SingleCollectives,
    Span,
    Survivors,
    Threshold,
    Topology,
    all_thresholds,
    broadcast_tensors,
    clean_fqn,
    gradient_divisors,
    memory_view,
    process_group_of,
    resolve_topology,
    telling,
)

__all__ = [
    "Collectives",
    "CommError",
    "CommHooks",
    "ExchangesValues",
    "FLAT_PARAM",
    "FlatParamError",
    "FlatParamHandle",
    "Fragment",
    "HookStage",
    "ParamSpec",
    "SingleCollectives",
    "Span",
    "Survivors",
    "Threshold",
    "Topology",
    "all_thresholds",
    "broadcast_tensors",
    "clean_fqn",
    "gradient_divisors",
    "memory_view",
    "process_group_of",
    "resolve_topology",
    "telling",
]
