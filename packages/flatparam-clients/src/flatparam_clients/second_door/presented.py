"""The class of a module that FSDP2's `fully_shard` has sharded, and what FSDP2 notes of such a module, as views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import attrs
from torch import nn

import flatparam_runtime as runtime
from flatparam import MixedPrecisionPolicy
from flatparam.compat import torchs_own
from flatparam.in_place.module import FSDPModule, freeing
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

    def _get_fsdp_state(self) -> StateView:
        """Return FSDP2's state of the module, as far as programs look into it."""
        return StateView(self)

    def _fqn_modifiers(self) -> dict[str, str]:  # type: ignore[override]  # the class refuses
        """Tell torch's functions of state that no name is changed."""
        return {}

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # A module around it loads it: what is copied to a parameter is copied to its part of the shard.
        load: Any = super(FSDPModule, self)._load_from_state_dict
        load(*arguments)


@final
@attrs.define(eq=False)
class StateView:
    """FSDP2's state of a module: the names in it that torch's pipelines, and programs, read or set."""

    _module: nn.Module

    @property
    def _unit(self) -> Any:
        return runtime.unit_of(self._module)

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        plan = self._unit.plan
        dtypes = (plan.precision.param_dtype, plan.precision.reduce_dtype, plan.casting.output_dtype)
        return MixedPrecisionPolicy(*dtypes, cast_forward_inputs=plan.casting.at_root)

    @property
    def _fsdp_param_groups(self) -> tuple[GroupView, ...]:
        return (GroupView(self._unit),) if self._unit.handles else ()

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> StateView:
        return self

    @property
    def all_states(self) -> tuple[StateView]:
        """Return itself: what torch's pipelines call is done for all modules inside at once."""
        return (self,)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that passes without synchronisation have collected; every rank calls it."""
        for tree in dict.fromkeys(map(runtime.tree_of, runtime.units_in(self._module))):
            tree.reduce_waiting()

    def _lazy_init(self) -> None:
        """Do nothing: the first pass finds the outermost module by itself."""

    def __getattr__(self, name: str) -> Any:
        raise _unknown("the state of a module", name, "_mp_policy, _fsdp_param_group, _lazy_init()")

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return bool(self._unit.plan.keeps_last)

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self._unit.change_plan(keeps_last=value, keeps_outermost=value)


@final
@attrs.frozen(eq=False)
class MeshView:
    """FSDP2's `FSDPMeshInfo` of a module."""

    mesh: Any
    shard_mesh_size: int
    """The number of ranks that share each parameter."""


@final
@attrs.define(eq=False)
class GroupView:
    """FSDP2's group of a module's parameters: the names in it that programs read or set."""

    _unit: Any

    @property
    def mesh_info(self) -> MeshView:
        """Return the ranks."""
        return MeshView(self._unit.topology.mesh, self._unit.topology.shard.size)

    @property
    def post_forward_mesh_info(self) -> MeshView | None:
        """Return the ranks among which the parameters are sharded after the forward pass; None if they stay whole."""
        plan = self._unit.plan
        ranks = getattr(plan.gathers, "ranks", self.mesh_info.shard_mesh_size)
        return MeshView(self.mesh_info.mesh, ranks) if plan.free_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: Any) -> None:
        plan = self._unit.plan
        ranks = 1 if value is None else value.shard_mesh_size
        how = True if ranks == plan.topology.shard.size else ranks
        self._unit.change_plan(**freeing(how, plan.topology, plan.gathers))

    @property
    def gradient_divide_factor(self) -> float | None:
        """Return the divisor of gradients that the user has set."""
        return self._unit.reducer.divide_factor  # type: ignore[no-any-return]

    def lazy_init(self) -> None:
        """Do nothing: the first pass finds the outermost module by itself."""

    def unshard(self, async_op: bool = False) -> None:
        """Gather the full parameters."""
        self._unit.hold()
        if not async_op:
            self._unit.finish_unshard()

    def wait_for_unshard(self) -> None:
        """Wait for the gather of `unshard`."""
        self._unit.finish_unshard()

    def reshard(self) -> None:
        """Free the full parameters."""
        self._unit.reshard()

    def post_backward(self) -> None:
        """Do nothing: the state reduces what waits."""

    def __getattr__(self, name: str) -> Any:
        raise _unknown("a group of parameters", name, "mesh_info, post_forward_mesh_info, unshard(), reshard()")


def _unknown(of: str, name: str, known: str) -> AttributeError:
    return AttributeError(f"flatparam has no {name} in FSDP2's private view of {of}, which has {known}: use FSDPModule")


def state_of(module: nn.Module) -> StateView | None:
    """Return FSDP2's state of a module that its `fully_shard` has sharded, or None."""
    return StateView(module) if isinstance(module, PresentedModule) else None


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
