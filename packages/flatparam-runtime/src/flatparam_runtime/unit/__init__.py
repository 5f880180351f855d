"""A unit: a module, the parameters that it shards together, and their state."""

from flatparam_runtime.unit.buffers import UnitBuffers, broadcast_buffers
from flatparam_runtime.unit.calls import ForwardCall, InnerCall, calls_module, running_calls
from flatparam_runtime.unit.initial_weights import InitialWeights
from flatparam_runtime.unit.module import (
    TREE,
    InnerCalls,
    LeafKey,
    LeafWatch,
    UnitModule,
    WatchedHandle,
    hooked_leaves_to_come,
    leaf_watches,
    next_number,
)
from flatparam_runtime.unit.observers import Event, EventKind, EventLog, Instrument
from flatparam_runtime.unit.phases import Phase
from flatparam_runtime.unit.plan import BackwardOrder, BufferDtype, Casting, PrefetchPlan, UnitPlan
from flatparam_runtime.unit.registry import (
    WAITING,
    drop_waiting,
    drop_waiting_of,
    held_in,
    holder_of,
    holder_of_parameter,
    inside,
    note_waiting,
    register_unit,
    revive_units,
    unit_of,
    units_in,
)
from flatparam_runtime.unit.unit import Unit, device_of

__all__ = [
    "TREE",
    "WAITING",
    "BackwardOrder",
    "BufferDtype",
    "Casting",
    "Event",
    "EventKind",
    "EventLog",
    "ForwardCall",
    "InitialWeights",
    "InnerCall",
    "InnerCalls",
    "Instrument",
    "LeafKey",
    "LeafWatch",
    "Phase",
    "PrefetchPlan",
    "Unit",
    "UnitBuffers",
    "UnitModule",
    "WatchedHandle",
    "leaf_watches",
    "next_number",
    "UnitPlan",
    "broadcast_buffers",
    "calls_module",
    "device_of",
    "drop_waiting",
    "drop_waiting_of",
    "hooked_leaves_to_come",
    "held_in",
    "holder_of",
    "holder_of_parameter",
    "inside",
    "note_waiting",
    "register_unit",
    "revive_units",
    "running_calls",
    "unit_of",
    "units_in",
]
