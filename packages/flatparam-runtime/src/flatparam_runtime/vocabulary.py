"""The names of lower layers that this package passes on: those that its signatures lead to.

A unit has flat parameters and a topology of groups; its plan is made of both. Signatures lead to a class if they name
it, or name a class whose own signatures do, and to the functions that make or take such values. `tools/check_layers.py`
refuses any other name, but for the few that it lists with a reason.
"""

from flatparam_comm import (
    FLAT_PARAM,
    Collectives,
    CommError,
    CommHooks,
    ExchangesValues,
    FlatLayout,
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
    names_of,
    process_group_of,
    resolve_topology,
    survivors_of,
    telling,
    warn_caller,
)

__all__ = [
    "Collectives",
    "CommError",
    "CommHooks",
    "ExchangesValues",
    "FLAT_PARAM",
    "FlatLayout",
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
    "warn_caller",
    "broadcast_tensors",
    "clean_fqn",
    "gradient_divisors",
    "memory_view",
    "names_of",
    "process_group_of",
    "resolve_topology",
    "survivors_of",
    "telling",
]
