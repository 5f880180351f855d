"""The wrapper's arguments, as the caller passed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs
import torch
import torch.distributed as dist
from torch import nn

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.layout import LayoutPolicy, RuleFunction
from flatparam.policies.policy import CustomPolicy, ModuleWrapPolicy, WrapFunction, _Policy
from flatparam_comm import Collectives, Topology
from flatparam_runtime import Nonfinite

# The types are there at runtime too, for `typing.get_type_hints`, unless torch was built without them.
if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    DeviceMesh = ProcessGroup = Collectives

__all__ = ["Arguments", "DeviceMesh", "Ignorable", "Policy", "ProcessGroup", "Ranks"]

Ranks: TypeAlias = (
    ProcessGroup
    | Collectives
    | Topology
    | str
    | tuple[ProcessGroup | Collectives | str, ProcessGroup | Collectives]
)
"""The ranks to shard over; a pair or a `Topology` also says which ranks hold copies."""
Policy: TypeAlias = ModuleWrapPolicy | CustomPolicy | _Policy | WrapFunction
"""A policy: it chooses the submodules that become units."""
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
    layout: LayoutPolicy | RuleFunction | None = None

    def by_name(self) -> dict[str, Any]:
        """Return each argument under its name."""
        return {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}

    def are(self, others: Arguments) -> bool:
        """Return whether each is the same object."""
        mine, theirs = self.by_name(), others.by_name()
        return all(mine[name] is theirs[name] for name in mine)
