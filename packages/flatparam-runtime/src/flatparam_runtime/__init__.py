"""The layer that decides when things happen: units, hooks, passes, prefetch, accumulation.

It shards a module by hooks, without a wrapper.
"""

from typing import TYPE_CHECKING

from flatparam_comm import (
    FLAT_PARAM,
    Box,
    Collectives,
    ExchangesValues,
    FlatLayout,
    FlatParamError,
    FlatParamHandle,
    Fragment,
    ParamSpec,
    SingleCollectives,
    Span,
    Threshold,
    Topology,
    clean_fqn,
    memory_view,
    module_behind,
    names_of,
    process_group_of,
    resolve_topology,
    warn_caller,
)
from flatparam_runtime.agreement.divergence import DivergenceError, check_same_between_passes, note_between_passes
from flatparam_runtime.agreement.nonfinite import Nonfinite, NonfiniteError
from flatparam_runtime.autograd import in_range, untraced
from flatparam_runtime.inspection.resting import full_views, gather_full, inspecting, refuse_in_a_pass, shown
from flatparam_runtime.inspection.summon import summon_full_params
from flatparam_runtime.optimizers import (
    COUNTERS,
    StepPreparation,
    clip_grad_norm_,
    clip_gradients_,
    note_step_of,
    notice_optimizers,
    part_states_of,
)
from flatparam_runtime.passes import (
    ROOT_NAME,
    UnitTree,
    call_unit,
    notice_failed_passes,
    register_forward_method,
    tree_of,
)
from flatparam_runtime.shard import Initialise, no_sync, observe, shard_module, skipped_steps
from flatparam_runtime.unit import (
    BackwardOrder,
    BufferDtype,
    Casting,
    Event,
    EventKind,
    EventLog,
    Instrument,
    Phase,
    PrefetchPlan,
    Unit,
    UnitPlan,
    drop_waiting,
    holder_of,
    holder_of_parameter,
    inside,
    revive_units,
    unit_of,
    units_in,
)

if TYPE_CHECKING:
    from flatparam_optim import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "COUNTERS",
    "StepPreparation",
    "Threshold",
    "warn_caller",
    "BackwardOrder",
    "Box",
    "BufferDtype",
    "Casting",
    "Collectives",
    "ExchangesValues",
    "DivergenceError",
    "check_same_between_passes",
    "note_between_passes",
    "Event",
    "EventKind",
    "EventLog",
    "FLAT_PARAM",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "Fragment",
    "Initialise",
    "Instrument",
    "Nonfinite",
    "NonfiniteError",
    "ParamSpec",
    "Phase",
    "PrefetchPlan",
    "ROOT_NAME",
    "SingleCollectives",
    "Span",
    "Topology",
    "Unit",
    "UnitPlan",
    "UnitTree",
    "call_unit",
    "clean_fqn",
    "clip_grad_norm_",
    "clip_gradients_",
    "drop_waiting",
    "full_views",
    "gather_full",
    "holder_of",
    "holder_of_parameter",
    "in_range",
    "inside",
    "inspecting",
    "memory_view",
    "module_behind",
    "names_of",
    "no_sync",
    "notice_failed_passes",
    "note_step_of",
    "notice_optimizers",
    "observe",
    "part_states_of",
    "process_group_of",
    "refuse_in_a_pass",
    "register_forward_method",
    "resolve_topology",
    "revive_units",
    "shard_module",
    "shown",
    "skipped_steps",
    "summon_full_params",
    "tree_of",
    "unit_of",
    "units_in",
    "untraced",
]

_MOVED = {
    "flatparam_optim": """
        allow_shards drop_flat_gradients follow_gradients kind_of_optimizer MatrixStepper newton_schulz_flops
        OptimizerKind originals_in Routes set_flat_steps step_in_segments tensors_stepped WholeStep
    """,
}
"""The names that were here, by the add-on that has them now; here they are promised."""
__all__ += " ".join(_MOVED.values()).split()
__getattr__ = names_of(_MOVED, __name__)
