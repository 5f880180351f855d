"""The wrapper's arguments as the caller passed them, and the environment variables that it reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final

import attrs
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from flatparam.addons import TRACE_FOLDER, load
from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.layout import LayoutPolicy, RuleFunction
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy, WrapFunction, _Policy
from flatparam_comm import Collectives, Precision, Topology
from flatparam_runtime import Nonfinite, warn_caller

__all__ = ["DeviceMesh", "Environment", "ProcessGroup", "Ranks"]


# The types are there at runtime too, for `typing.get_type_hints`, unless torch was built without them.
if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    DeviceMesh = ProcessGroup = Collectives


Ranks: TypeAlias = (
    ProcessGroup | Collectives | Topology | str | tuple[ProcessGroup | Collectives | str, ProcessGroup | Collectives]
)
"""The ranks to shard over; a pair or a `Topology` also says which ranks hold copies."""
Policy: TypeAlias = ModuleWrapPolicy | CustomPolicy | _Policy | WrapFunction
"""A policy: it chooses the submodules that become units."""
Reduction: TypeAlias = Literal["default", "exact"]
Wire: TypeAlias = Literal["default", "bf16", "fp32"] | object
"""One of these words, or a `flatparam_sums.Wire`."""
Ignorable: TypeAlias = Iterable[nn.Module] | Iterable[nn.Parameter]
"""The things to leave whole: all modules, or all parameters."""


@final
@attrs.frozen(eq=False, kw_only=True)
class Arguments:
    """The wrapper's arguments beside the module."""

    process_group: Ranks | None = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Policy | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: int = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Ignorable | None = None
    device_mesh: DeviceMesh | None = None
    broadcast_buffers: bool = False
    clean_names: bool = False
    nonfinite: Nonfinite = "ignore"
    reduction: Reduction = "default"
    wire: Wire = "default"
    layout: LayoutPolicy | RuleFunction | None = None

    def by_name(self) -> dict[str, Any]:
        """Return each argument under its name."""
        return {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}

    def are(self, others: Arguments) -> bool:
        """Return whether each is the same object."""
        mine, theirs = self.by_name(), others.by_name()
        return all(mine[name] is theirs[name] for name in mine)


_EFFECTS: Final = {
    "FSDP_USE_FAKE_ALL_GATHER": "parameters are not gathered: every result is wrong, and only timings mean something",
    "FSDP_USE_FAKE_REDUCE": "gradients are not reduced: every result is wrong, and only timings mean something",
    "FSDP_SKIP_WRITEBACK_CHECK": "parameters that were given other data after wrapping are not noticed",
}
_told: set[str] = set()


@final
@attrs.frozen
class Environment:
    """The switches of the environment, each on if it is `"1"`; read when a wrapper is made."""

    full_precision_in_eval: bool = False
    skip_writeback_check: bool = False
    fake_all_gather: bool = False
    fake_reduce: bool = False
    nodes_of: int | None = None
    """Ranks per node as torchrun says (`LOCAL_WORLD_SIZE`), or `None`."""
    trace_folder: str | None = None
    """Where each rank leaves a trace of the program (`FLATPARAM_TRACE`), or `None`."""

    @classmethod
    def read(cls) -> Self:
        """Return the switches now; the first time that a switch is found on, a warning says what the switch does."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        return cls(
            _is_on("FSDP_USE_FULL_PREC_IN_EVAL"),
            _is_on("FSDP_SKIP_WRITEBACK_CHECK"),
            _is_on("FSDP_USE_FAKE_ALL_GATHER"),
            _is_on("FSDP_USE_FAKE_REDUCE"),
            int(local) if local.isdigit() else None,
            os.environ.get(TRACE_FOLDER) or None,
        )


def _is_on(name: str) -> bool:
    on = os.environ.get(name) == "1"
    if on and name in _EFFECTS and name not in _told:
        _told.add(name)
        warn_caller(f"{name}=1: {_EFFECTS[name]}")
    return on


def carriage_of(precision: Precision, reduction: Reduction, wire: Wire) -> dict[str, Any]:
    """Return the fields of a plan that say in which dtypes, and how, parameters and gradients travel.

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(wire, str) and wire == "fp32":
        precision, wire = attrs.evolve(precision, reduce_dtype=torch.float32), "default"
    if isinstance(wire, str) and reduction == wire == "default":
        return {"precision": precision}
    return {"precision": precision, **load("flatparam_sums").carriage(reduction, wire)}
