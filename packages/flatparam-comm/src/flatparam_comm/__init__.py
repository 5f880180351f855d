"""Moving bytes between ranks: engines behind one protocol, decorators over any of them, an exact ledger of bytes."""

from typing import TYPE_CHECKING

from flatparam_comm.addons import module_behind, names_of
from flatparam_comm.broadcasting import broadcast_tensors
from flatparam_comm.checks import REDUCIBLE
from flatparam_comm.collectives import (
    COMPLETED,
    Collectives,
    CompletedPending,
    ContinuedPending,
    ExchangesValues,
    Parts,
    Pending,
    ReduceOp,
    TakesParts,
    takes_parts,
)
from flatparam_comm.decorators.faults import Delay, Fault, FaultyCollectives, Kill, Raise
from flatparam_comm.decorators.forwarding import ForwardingCollectives
from flatparam_comm.decorators.ledger import ByteLedger, RecordingCollectives, Totals, Transfer, sent_nbytes
from flatparam_comm.decorators.replacing import CommHook, CompressedCollectives, HookedCollectives, SilentCollectives
from flatparam_comm.errors import (
    CollectiveError,
    CommError,
    DeadlockError,
    MismatchError,
    PeerError,
    RankDied,
    RankError,
    RemoteFailure,
    WorldTimeout,
    said_by_ranks,
    told_by_ranks,
    told_ranks,
)
from flatparam_comm.guarding import (
    GroupMonitor,
    Guard,
    SurvivingRanks,
    end_of_call,
    survivors_of,
    tell_failure,
    telling,
    watch_call,
)
from flatparam_comm.process_group.engine import ProcessGroupCollectives, engine_of, process_group_of
from flatparam_comm.single import RanksOnly, SingleCollectives
from flatparam_comm.threads.current import current_collectives
from flatparam_comm.threads.world import run_threads
from flatparam_comm.topology.resolving import resolve_topology, with_shared_memory
from flatparam_comm.topology.topology import Topology
from flatparam_comm.transfer.comm_hooks import CommHooks, HookStage
from flatparam_comm.transfer.gather import Gather
from flatparam_comm.transfer.reduction import Averaging, Reduced, Reducer, Reduction, gradient_divisors
from flatparam_comm.transfer.streams import Mark, NoStreams, OnDevice, acting_as, streams_of
from flatparam_comm.transfer.uneven import gather_shards
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
    LayoutRule,
    ParamSpec,
    Precision,
    Residency,
    Span,
    Threshold,
    Transitions,
    clean_fqn,
    discover,
    each_module,
    handle_of,
    memory_view,
    owner_of,
    warn_caller,
)

if TYPE_CHECKING:
    from flatparam_guard import Survivors, set_relay
    from flatparam_onehost import SharedMemoryCollectives, shared_memory

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "CommHooks",
    "HookStage",
    "Gather",
    "Reduced",
    "Reducer",
    "Reduction",
    "Mark",
    "NoStreams",
    "OnDevice",
    "acting_as",
    "streams_of",
    "gradient_divisors",
    "GroupMonitor",
    "Guard",
    "LayoutRule",
    "Threshold",
    "warn_caller",
    "COMPLETED",
    "FLAT_PARAM",
    "REDUCIBLE",
    "BoundParameter",
    "Box",
    "BufferPool",
    "ByteLedger",
    "CollectiveError",
    "Collectives",
    "CommError",
    "CommHook",
    "CompletedPending",
    "CompressedCollectives",
    "ContinuedPending",
    "DeadlockError",
    "ExchangesValues",
    "Survivors",
    "SurvivingRanks",
    "Delay",
    "Fault",
    "FaultyCollectives",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParameter",
    "Flattening",
    "Fragment",
    "ForwardingCollectives",
    "HookedCollectives",
    "Kill",
    "MismatchError",
    "ParamSpec",
    "Parts",
    "PeerError",
    "Pending",
    "Precision",
    "ProcessGroupCollectives",
    "Raise",
    "RankDied",
    "RankError",
    "RemoteFailure",
    "RecordingCollectives",
    "ReduceOp",
    "Residency",
    "SharedMemoryCollectives",
    "SilentCollectives",
    "RanksOnly",
    "SingleCollectives",
    "Span",
    "TakesParts",
    "Topology",
    "Totals",
    "Transfer",
    "Transitions",
    "WorldTimeout",
    "broadcast_tensors",
    "clean_fqn",
    "current_collectives",
    "discover",
    "each_module",
    "gather_shards",
    "handle_of",
    "engine_of",
    "memory_view",
    "module_behind",
    "names_of",
    "owner_of",
    "process_group_of",
    "resolve_topology",
    "run_threads",
    "said_by_ranks",
    "told_by_ranks",
    "sent_nbytes",
    "set_relay",
    "shared_memory",
    "takes_parts",
    "end_of_call",
    "watch_call",
    "survivors_of",
    "tell_failure",
    "telling",
    "told_ranks",
    "with_shared_memory",
]

__getattr__ = names_of(
    {"flatparam_guard": "Survivors set_relay", "flatparam_onehost": "SharedMemoryCollectives shared_memory"},
    __name__,
)
