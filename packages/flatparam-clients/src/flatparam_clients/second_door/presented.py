"""The class of a module that FSDP2's `fully_shard` has sharded: its state is what its parameters show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

import flatparam_runtime as runtime
from flatparam.compat import torchs_own
from flatparam.in_place.module import FSDPModule
from flatparam_clients.names import STATE_FUNCTIONS
from flatparam_core import FlatParamError

_TAKEN_FOR_GRANTED: Final[Mapping[str, str]] = {
    "set_force_sum_reduction_for_comms": "collectives always sum, and the division is ours",
    "set_reduce_scatter_unused_params": "parameters without a gradient on some rank always take part",
    "reset_iter_state": "a model is usable after an exception",
}
"""The methods of FSDP2 that have no effect, and why."""

_REFUSED: Final[Mapping[str, str]] = {
    "set_custom_all_gather": "gathers are flatparam's own; use the wrapper and register_comm_hook() to change sums",
    "set_custom_reduce_scatter": "use FullyShardedDataParallel and its register_comm_hook()",
    "set_all_reduce_hook": "use FullyShardedDataParallel and its register_comm_hook()",
    "set_reduce_scatter_max_input_buffers": "reductions are limited by the memory that a unit's gradients take",
    "set_separate_reduce_scatter_group": "gathers and reductions share the group of the mesh",
    "set_allocate_memory_from_process_group_for_comm": "buffers are flatparam's own",
    "set_symm_mem_for_comm": "buffers are flatparam's own",
    "set_manual_backward_finalization": "each backward pass completes; use set_requires_gradient_sync(False) before it",
    "finalize_backward": "each backward pass completes; use set_requires_gradient_sync(False) before it",
    "set_keep_unsharded_storage": "docs/accelerators.md says which steps can be captured in a graph",
}
"""The methods of FSDP2 that are refused, and what to do."""


class PresentedModule(FSDPModule):
    """A module whose parameters are `DTensor`s, so that torch's own functions of state are right about it."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the parameters, detached, in the memory of the shards, and the buffers; as torch's FSDP2 does."""
        for unit in runtime.units_in(self):
            if not unit.is_needed:
                unit.reshard()
        ask: Any = super(FSDPModule, self).state_dict
        return ask(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    _is_fsdp_managed_module = True  # Torch's FSDP2 notes it for the compiler, and libraries that shard by it, too.

    def _fqn_modifiers(self) -> dict[str, str]:  # type: ignore[override]  # the class refuses
        """Tell torch's functions of state that no name is changed."""
        return {}

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # A module around it loads it: what is copied to a parameter is copied to its part of the shard.
        load: Any = super(FSDPModule, self)._load_from_state_dict
        load(*arguments)


def _taken_for_granted(name: str, why: str) -> Callable[..., None]:
    def method(self: PresentedModule, *args: Any, **kwargs: Any) -> None: ...

    method.__name__, method.__doc__ = name, f"Accept FSDP2's call: it has no effect, because {why}."
    return method


def _refused(name: str, why: str) -> Callable[..., None]:
    def method(self: PresentedModule, *args: Any, **kwargs: Any) -> None:
        unit: Any = runtime.unit_of(self)
        raise FlatParamError(
            f"rank {unit.topology.rank}: {name}() of torch's FSDPModule is not available: {why}; "
            "flatparam.install(fsdp2=False) leaves fully_shard to torch"
        )

    method.__name__, method.__doc__ = name, f"Refuse FSDP2's call: {why}."
    return method


for _make, _reasons in ((_taken_for_granted, _TAKEN_FOR_GRANTED), (_refused, _REFUSED)):
    for _name, _why in _reasons.items():
        setattr(PresentedModule, _name, _make(_name, _why))


def presents(model: nn.Module) -> bool:
    """Return whether a module of `model` was sharded by FSDP2's `fully_shard`."""
    return any(isinstance(each, PresentedModule) for each in model.modules())


def routed(name: str, ours: Any) -> Any:
    """Return the function `name` of `torch.distributed.checkpoint.state_dict`: torch's own for models that present."""

    @functools.wraps(ours)
    def function(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not presents(model):
            return ours(model, *args, **kwargs)
        if kwargs.get("options") is not None:
            # A class of ours may have taken the name of torch's.
            kwargs["options"] = torchs_own(STATE_FUNCTIONS, "StateDictOptions")(**vars(kwargs["options"]))
        return torchs_own(STATE_FUNCTIONS, name)(model, *args, **kwargs)

    return function
