"""The wrapper: FSDP1's class, each of whose methods calls a function of the module of its noun.

FSDP1's module of this name also has the names of the configurations and policies; so has this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

import flatparam_runtime as runtime
from flatparam.addons import promise_clients_names, raise_if_lacking, tell_clients
from flatparam.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from flatparam.in_place.module import refuse_in_place
from flatparam.layout import LayoutPolicy, RuleFunction
from flatparam.resolving.arguments import Arguments, DeviceMesh, Ignorable, Policy, Ranks, Reduction, Wire
from flatparam.resolving.settings import Resolved, ResolvedTree, backward_prefetch_of, resolve_prefetch, resolve_tree
from flatparam.sharding.make_unit import shard_tree
from flatparam.state import form_settings, load_hooks, optimizer, saving
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam.wrapper import interior, refusing, training
from flatparam.wrapper.interior import Interior, inner_module, wrappers_in
from flatparam_comm import HookStage
from flatparam_core import FSDP_WRAPPED_MODULE, FlatParameter
from flatparam_runtime import Nonfinite
from flatparam_state import offload, onload

if TYPE_CHECKING:
    from flatparam_clients import older_functions

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer states over data-parallel ranks.

    A drop-in successor of `torch.distributed.fsdp.FullyShardedDataParallel`: the arguments are FSDP1's and
    mean the same. Every rank wraps an equal module; the parameters of the module that no unit inside it holds
    become one unit.

    Args:
        module: the module to wrap, in place.
        process_group: the ranks to shard over: a `ProcessGroup`, a `Collectives` of `flatparam_comm`, or
            `None` for the default group (in a world of threads: for that world). For the hybrid strategies a pair: the
            ranks to shard over, and those that hold copies of a shard; `None` (with a policy): inside and across nodes.
        sharding_strategy: `FULL_SHARD` (default) frees full parameters between forward and backward,
            `SHARD_GRAD_OP` after the backward only; `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2` do the same inside groups
            of ranks and hold copies across them; `NO_SHARD` holds everything everywhere.
        cpu_offload: whether shards and their gradients, and so the optimizer's states, are in CPU memory.
        auto_wrap_policy: chooses the submodules that become units; see `flatparam.wrap`.
        backward_prefetch: when the next unit is gathered in the backward pass.
        mixed_precision: the dtypes of computation, reduction, buffers and inputs.
        ignored_modules: modules that are left whole, with all modules below them.
        param_init_fn: gives values to a module on the meta device; by default its `reset_parameters()` does.
        device_id: the device for the parameters.
        sync_module_states: whether all ranks start from rank 0's parameters and buffers.
        forward_prefetch: gather the next unit while this one computes, in the order of the previous pass; a number
            gathers as many units ahead.
        limit_all_gathers: accepted for FSDP1's sake; there is nothing to limit, because memory is allocated and freed
            in the order of the computation (see `docs/differences-from-torch.md`).
        use_orig_params: whether `parameters()` lists the original parameters, or one flat parameter for each unit.
        ignored_states: modules, or parameters, that are left whole.
        device_mesh: the ranks to shard over, as a mesh of one dimension; of two (replicate, shard) for the hybrid
            strategies.
        broadcast_buffers: start every training forward from rank 0's buffers. Not in FSDP1.
        clean_names: have `named_parameters()` and `named_buffers()` give the names of the unwrapped module always, not
            only while parameters are summoned. Not in FSDP1.
        nonfinite: what follows if a gradient is infinite or not a number, on any rank, at the end of a backward pass:
            `"raise"` a `NonfiniteError` on every rank, with the rank and the parameter; `"skip"` the optimizer's next
            step on every rank (`skipped_steps` counts); `"ignore"` it, as FSDP1 does. Not in FSDP1.
        reduction: `"exact"` adds gradients without an error and rounds once, so that neither the number of ranks nor
            the ranks of micro-batches matter (`docs/guides/same-bits.md`). Not in FSDP1.
        wire: `"bf16"` rounds what a rank sends for a gradient to bfloat16, and adds exactly; `"fp32"` reduces in
            float32; a `flatparam_sums.Wire` has formats for each way. Not in FSDP1.
        layout: what of each parameter stays on one rank: `flatparam.layout.by(...)`,
            `flatparam.layout.for_optimizer(...)`, or a function of name and parameter; by default each rank's part
            begins and ends anywhere. Names are those below `module`; see `docs/layouts.md`. Not in FSDP1.

    Raises:
        ValueError, TypeError: for arguments that do not fit each other or the module, naming them.
    """

    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    limit_all_gathers: bool
    _interior: Interior
    _offered: Resolved
    """The settings that were resolved for a module that a policy chose, until a subclass's constructor takes them."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Ranks | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool | int = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Ignorable | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        broadcast_buffers: bool = False,
        clean_names: bool = False,
        nonfinite: Nonfinite = "ignore",
        reduction: Reduction = "default",
        wire: Wire = "default",
        layout: LayoutPolicy | RuleFunction | None = None,
    ) -> None:
        """Wrap `module` in place; every rank calls it."""
        asked = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
            broadcast_buffers=broadcast_buffers,
            clean_names=clean_names,
            nonfinite=nonfinite,
            reduction=reduction,
            wire=wire,
            layout=layout,
        )
        given: object = module
        if not isinstance(given, nn.Module):
            raise TypeError(f"{type(self).__name__}: expected a module, found {given!r}")
        refuse_in_place(module)
        self._install(module, resolve_tree(type(self), module, asked, vars(self).pop("_offered", None)))

    def _install(self, module: nn.Module, tree: ResolvedTree) -> None:
        """Wrap `module`, after those inside that the policy chose, as the whole tree was resolved."""
        super().__init__()
        unit = shard_tree(module, tree, type(self)._wrapped)
        resolved = tree.root
        self.sharding_strategy = resolved.strategy
        self.mixed_precision = resolved.mixed_precision
        self.cpu_offload = CPUOffload(resolved.plan.storage_device is not None)
        self.limit_all_gathers = resolved.asked.limit_all_gathers
        tell_clients("wrapped")
        left_whole, clean_names = resolved.ignored.modules, resolved.asked.clean_names
        self._interior = Interior(unit, form_settings.default_settings(), left_whole, clean_names)
        load_hooks.attach_loading(self)
        saving.attach_saving(self)
        self._modules[FSDP_WRAPPED_MODULE] = module

    @classmethod
    def _wrapped(cls, module: nn.Module, resolved: Resolved) -> FullyShardedDataParallel:
        """Return the wrapper of a module that the policy of a wrapper around it chose.

        A subclass with a constructor of its own is called with FSDP1's arguments, and may pass on different ones.
        """
        arguments = resolved.asked.by_name()
        # As calling the class does.
        wrapper = cls.__new__(cls, module, **arguments)  # type: ignore[call-arg]
        if cls.__init__ is FullyShardedDataParallel.__init__:
            wrapper._install(module, ResolvedTree(resolved))
        else:
            vars(wrapper)["_offered"] = resolved
            cls.__init__(wrapper, module, **arguments)
        return wrapper

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy of a different wrapper, or one from a file."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        runtime.revive_units(self)

    # The wrapped module

    forward = interior.forward
    """Call the wrapped module, with its full parameters in place: takes its arguments and returns what it returns."""

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation-checkpointing wrapper around it."""
        return interior.module_of(self)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        # The user says that the module can be indexed.
        return self.module[key]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        """Look `name` up in the wrapped module if the wrapper has no such attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(FSDP_WRAPPED_MODULE)
            if inner is not None and name == "join_hook":
                return partial(refusing.refuse_join, self._unit)
            if inner is None or not hasattr(inner, name):
                raise_if_lacking(type(self), name)
                raise
            return getattr(inner, name)

    # Facts

    @property
    def process_group(self) -> Any:
        """The process group over which the parameters are sharded."""
        return interior.process_group(self._unit)

    @property
    def rank(self) -> int:
        """This process's rank in the group over which the parameters are sharded."""
        return interior.ranks_of(self._unit).rank

    @property
    def world_size(self) -> int:
        """The number of ranks over which the parameters are sharded."""
        return interior.ranks_of(self._unit).size

    @property
    def compute_device(self) -> torch.device:
        """The device of the unit's parameters."""
        return self._unit.device

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameters that this wrapper holds, in both settings of `use_orig_params`."""
        return [handle.flat_param for handle in self._unit.handles]

    def check_is_root(self) -> bool:
        """Return whether no other wrapper contains this one, as far as forward passes have shown."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in `module`, itself included, depth first, each once.

        Args:
            root_only: return the outermost wrappers only, as far as any forward pass has shown.
        """
        found = wrappers_in(module, root_only=root_only)
        wrappers = [wrapper for wrapper in found if isinstance(wrapper, FullyShardedDataParallel)]
        return [wrapper for wrapper in wrappers if wrapper._is_root] if root_only else wrappers

    # Training

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the next unit of the backward pass is gathered; a new value takes effect in the next pass."""
        return backward_prefetch_of(self._unit.plan.prefetch)

    @backward_prefetch.setter
    def backward_prefetch(self, when: BackwardPrefetch | None) -> None:
        self._change_prefetch(backward=resolve_prefetch(False, when).backward)

    @property
    def forward_prefetch(self) -> int:
        """The number of units that are gathered ahead in the forward pass, on every device.

        If it is 0, an accelerator gathers units ahead all the same. A new value takes effect in the next pass.
        """
        units = self._unit.plan.prefetch.forward or 0
        return units if units > 1 else bool(units)

    @forward_prefetch.setter
    def forward_prefetch(self, units: int) -> None:
        self._change_prefetch(forward=int(units) or None)

    def _change_prefetch(self, **changes: Any) -> None:
        self._unit.change_plan(prefetch=attrs.evolve(self._unit.plan.prefetch, **changes))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Gather the units of `modules` when this unit's forward begins; `None` follows the order of the last pass."""
        training.set_units_to_forward_prefetch(self._unit, modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Gather the units of `modules` when this unit's backward begins; `None` follows the order of the forward."""
        training.set_units_to_backward_prefetch(self._unit, modules)

    @property
    def skipped_steps(self) -> int:
        """The number of backward passes after which `nonfinite="skip"` skipped the step on all ranks."""
        return runtime.skipped_steps(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and drop those that `no_sync` has collected; every rank calls it."""
        super().zero_grad(set_to_none)
        runtime.drop_waiting(runtime.units_in(self))

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication; the first backward pass outside reduces the sum."""
        return runtime.no_sync(self)

    def accumulate(self, weight: float | Tensor | None = None) -> AbstractContextManager[None]:
        """Compute one micro-batch inside: the passes of one mean loss. Gradients are collected, and not reduced.

        Args:
            weight: what it counts, such as its tokens; any rank may have any number of micro-batches. Without, every
                rank has equally many, which count alike.
        """
        return training.accumulate(self, weight)

    def reduce_gradients(self) -> None:
        """Give each parameter the weighted mean of the gradients of all ranks' micro-batches; every rank calls it."""
        training.reduce_gradients(self)

    def uneven_inputs(self, step: Callable[[], object]) -> AbstractContextManager[None]:
        """Train inside with data that end earlier on some ranks, which then serve the others until all have ended.

        Args:
            step: what every rank does after each `reduce_gradients`: clip, step the optimizer, zero the gradients.
        """
        return training.uneven_inputs(self, step)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip the total norm of the gradients of all ranks, and return the norm before clipping; every rank calls it.

        Args:
            error_if_nonfinite: if the norm is not finite, raise on every rank, and change nothing.
            foreach: see `torch.nn.utils.clip_grad_norm_`.
        """
        return runtime.clip_grad_norm_(
            self, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite, foreach=foreach
        )

    def register_comm_hook(
        self, state: object, hook: Callable[..., Any] | None, *, stage: HookStage = "reduce"
    ) -> None:
        """Call `hook` instead of a collective of this unit and of all units inside.

        Args:
            state: the first argument of each call of the hook.
            hook: for `"reduce"`, FSDP1's hook: `(state, gradient, shard to write)`, or `(state, gradient)` in place
                if nothing is sharded; the hook also averages. For `"all_reduce"`: `(state, shard of the gradient)`, in
                place, over the copies of a shard; the hook also averages. For `"all_gather"`: `(state, shard, full to
                write)`. `None` removes the hook, so that a different one can be registered.
            stage: the collective that the hook replaces.

        Raises:
            ValueError: if the hook cannot be called.
            AssertionError: if a unit has a hook for this stage already. In either case no hook is registered.
        """
        training.register_comm_hook(runtime.units_in(self), state, hook, stage)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward passes sum gradients over the copies of a shard, or only inside the shard groups.

        FSDP2 has the same method. Gradients that were not summed over the copies wait, sharded, for a pass that does.
        """
        units = runtime.units_in(self) if recurse else (self._unit,)
        training.set_requires_all_reduce(units, requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of the gradients by `factor` instead of the number of ranks. FSDP2 has the same method."""
        training.set_divide_factor(runtime.units_in(self), factor)

    # Parameters

    @staticmethod
    def register_forward_method(module: nn.Module, name: str) -> None:
        """Gather full parameters for calls of the method `name` of a module in a unit, as for calls of `forward`."""
        runtime.register_forward_method(inner_module(module), name)

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Show full parameters under their own names inside the context; every rank enters it.

        `flatparam_runtime.summon_full_params` describes what is possible inside. Clone what is to outlive the context.

        Args:
            recurse: whether to show the parameters of inner units too.
            writeback: whether to keep changes that are made inside; each rank keeps its own part.
            rank0_only: whether to show the parameters on rank 0 only, and keep the changes of rank 0.
            offload_to_cpu: whether to show the parameters in CPU memory.
            with_grads: whether to show full gradients too.
        """
        return runtime.summon_full_params(
            inner_module(module),
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def offload(self, *args: Any, **kwargs: Any) -> Any:
        """Call `flatparam.offload(self, ...)`, or the method `offload` of the wrapped module, if it has one."""
        return self._own_or("offload", offload)(*args, **kwargs)

    def onload(self, *args: Any, **kwargs: Any) -> Any:
        """Call `flatparam.onload(self, ...)`, or the method `onload` of the wrapped module, if it has one."""
        return self._own_or("onload", onload)(*args, **kwargs)

    def _own_or(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped module's own method `name`, as FSDP1 forwards it; if it has none, `function` of this wrapper."""
        own = getattr(type(inner_module(self)), name, None)
        is_ours = own is getattr(FullyShardedDataParallel, name)
        return partial(function, self) if own is None or is_ours else getattr(inner_module(self), name)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside with its full parameters in place, and keep the changes.

        Every rank calls this method and keeps its own part of its own changes, so seed all ranks alike.
        """
        if self._unit.showing.wishes is not None:
            return super().apply(fn)
        with runtime.summon_full_params(self):
            return super().apply(fn)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """List names and parameters; while full parameters are summoned, under the names of the unwrapped module.

        Full parameters are listed inside their unit's forward pass, and while they are summoned. Otherwise the list has
        the parameters that an optimizer holds, even if a unit keeps full parameters from forward to backward.
        """
        pairs = super().named_parameters(prefix, recurse, remove_duplicate)
        yield from interior.listed(interior.named(self._interior, pairs))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """List names and buffers; while full parameters are summoned, under the names of the unwrapped module."""
        yield from interior.named(self._interior, super().named_buffers(prefix, recurse, remove_duplicate))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the shards as wholes; the original parameters follow as views of them.

        Inside `summon_full_params` the full parameters move instead, and only until it ends.
        """
        with interior.moving_shards(interior.not_summoned(runtime.units_in(self)), fn):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # State

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of the state of every wrapper in `module`.

        Returns:
            The first wrapper's previous settings, to be set again; if there is no wrapper, all three are `None`.

        Raises:
            RuntimeError: if a configuration is not one of the form's.
            AssertionError: if the previous forms differ, so that one call could not set them again.
        """
        return form_settings.set_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of the wrappers in `module`, which must agree; `None` if there is no wrapper.

        Raises:
            AssertionError: if they differ.
        """
        return form_settings.settings_of(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Choose the form of the state inside the context; leaving it, even by an exception, restores the settings."""
        return form_settings.settings_shown(module, state_dict_type, state_dict_config, optim_state_dict_config)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state of the module as if it were not wrapped, in the chosen form; every rank calls it.

        Its tensors are copies. If some were written to in place, and not loaded, the next call warns of it.
        """
        named = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        saving.warn_of_writes(self)
        state = saving.save_state(self, self._interior, args, named, super().state_dict)
        if destination is None and not args:
            saving.watch(self, state)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of any form; every rank calls it.

        Every rank passes the whole of a full state, and copies its own part. If `FullStateDictConfig(rank0_only=True)`
        is set, the other ranks may pass an empty dict: then the first rank sends its tensors, one after the other.
        If anything does not fit, nothing is changed.
        """
        saving.forget(self)
        load = partial(super().load_state_dict, assign=assign)
        return load_hooks.load_state(self, self._interior, state_dict, strict, load)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Ranks | None = None,
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameter name, in the chosen form; every rank calls it.

        A sharded one of an optimizer that has not stepped yet is what the first step will start from, so that programs
        can load a checkpoint into its tensors; the optimizer is not changed. In FSDP1 it is empty, and nothing is
        loaded.

        Args:
            optim_state_dict: the result of `optim.state_dict()`; by default this method calls it.
            group: the ranks over which the parameters are sharded; the model knows them, and refuses different ranks.
        """
        return optimizer.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Ranks | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of an optimizer state of any form, for `optim.load_state_dict`; every rank calls it.

        Args:
            optim_state_dict: a state of any form; every rank passes the whole of a full state. With
                `FullOptimStateDictConfig(rank0_only=True)` only the first rank's state counts, and the first rank
                sends its tensors, one after the other.
            is_named_optimizer: whether the state of `optim` has names as keys, not numbers.
            load_directly: whether to call `optim.load_state_dict` too.
            group: the ranks over which the parameters are sharded; the model knows them, and refuses different ranks.
        """
        return optimizer.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named=is_named_optimizer, load_directly=load_directly, group=group
        )

    # FSDP1's older methods for optimizer state, which the add-on flatparam-clients has

    if TYPE_CHECKING:
        full_optim_state_dict = staticmethod(older_functions.full_optim_state_dict)
        sharded_optim_state_dict = staticmethod(older_functions.sharded_optim_state_dict)
        shard_full_optim_state_dict = staticmethod(older_functions.shard_full_optim_state_dict)
        scatter_full_optim_state_dict = staticmethod(older_functions.scatter_full_optim_state_dict)
        flatten_sharded_optim_state_dict = staticmethod(older_functions.flatten_sharded_optim_state_dict)
        rekey_optim_state_dict = staticmethod(older_functions.rekey_optim_state_dict)

    # FSDP1's names with an underscore that torch or the wrapper itself asks for; `flatparam.addons` has the others

    @property
    def _unit(self) -> runtime.Unit:
        return self._interior.unit

    @property
    def _is_root(self) -> bool:
        return runtime.tree_of(self._unit).root is self._unit

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Do nothing. FSDP1 remembers the root; here each pass finds it, so to read it tells what is."""

    _fqn_modifiers = refusing.refuse_torchs_functions
    _ddp_params_and_buffers_to_ignore = refusing.DDP_ASKS
    _is_fsdp_managed_module = refusing.FSDP_MARKS


promise_clients_names(FullyShardedDataParallel, FlatParameter)
