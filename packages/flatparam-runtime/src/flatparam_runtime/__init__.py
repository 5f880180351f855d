"""The layer that decides when things happen: units, hooks, passes, prefetch, accumulation.

It shards a module by hooks, without a wrapper.
"""

from flatparam_runtime.agreement.divergence import DivergenceError
from flatparam_runtime.agreement.nonfinite import Nonfinite, NonfiniteError
from flatparam_runtime.autograd import in_range, untraced
from flatparam_runtime.inspection.resting import full_views, gather_full, inspecting, refuse_in_a_pass, shown
from flatparam_runtime.inspection.summon import summon_full_params
from flatparam_runtime.optimizers.clip import clip_grad_norm_, clip_gradients_
from flatparam_runtime.optimizers.matrices.members import drop_flat_gradients, follow_gradients, originals_in
from flatparam_runtime.optimizers.matrices.owners import newton_schulz_flops
from flatparam_runtime.optimizers.matrices.routes import Routes
from flatparam_runtime.optimizers.matrices.stepper import MatrixStepper
from flatparam_runtime.optimizers.matrices.whole_step import WholeStep
from flatparam_runtime.optimizers.shape_rules import allow_shards
from flatparam_runtime.optimizers.stepping import (
    notice_optimizers,
    set_flat_steps,
    step_in_segments,
    tensors_stepped,
)
from flatparam_runtime.passes.backward import notice_failed_passes
from flatparam_runtime.passes.hooks import register_forward_method
from flatparam_runtime.passes.tree import ROOT_NAME, UnitTree, tree_of
from flatparam_runtime.shard import Initialise, no_sync, observe, shard_module, skipped_steps
from flatparam_runtime.unit.events import Event, EventKind, EventLog, Instrument
from flatparam_runtime.unit.phases import Phase
from flatparam_runtime.unit.plan import BackwardOrder, BufferDtype, Casting, PrefetchPlan, UnitPlan
from flatparam_runtime.unit.registry import holder_of, inside, revive_units, unit_of, units_in
from flatparam_runtime.unit.unit import Unit
from flatparam_runtime.unit.waiting import drop_waiting
from flatparam_runtime.vocabulary import (
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
)

__version__ = "0.1.0"

__all__ = [
    "Threshold",
    "all_thresholds",
    "BackwardOrder",
    "BufferDtype",
    "Casting",
    "Collectives",
    "CommError",
    "CommHooks",
    "ExchangesValues",
    "Survivors",
    "DivergenceError",
    "Event",
    "EventKind",
    "EventLog",
    "FLAT_PARAM",
    "FlatParamError",
    "FlatParamHandle",
    "Fragment",
    "HookStage",
    "Initialise",
    "Instrument",
    "MatrixStepper",
    "Nonfinite",
    "NonfiniteError",
    "ParamSpec",
    "Phase",
    "PrefetchPlan",
    "ROOT_NAME",
    "Routes",
    "SingleCollectives",
    "Span",
    "Topology",
    "Unit",
    "UnitPlan",
    "UnitTree",
    "WholeStep",
    "broadcast_tensors",
    "allow_shards",
    "clean_fqn",
    "clip_grad_norm_",
    "clip_gradients_",
    "drop_waiting",
    "drop_flat_gradients",
    "follow_gradients",
    "full_views",
    "gather_full",
    "gradient_divisors",
    "holder_of",
    "in_range",
    "inside",
    "inspecting",
    "memory_view",
    "newton_schulz_flops",
    "no_sync",
    "notice_failed_passes",
    "notice_optimizers",
    "observe",
    "originals_in",
    "process_group_of",
    "refuse_in_a_pass",
    "register_forward_method",
    "resolve_topology",
    "revive_units",
    "set_flat_steps",
    "shard_module",
    "shown",
    "skipped_steps",
    "step_in_segments",
    "summon_full_params",
    "tensors_stepped",
    "tree_of",
    "unit_of",
    "units_in",
    "untraced",
]
