"""The wrapper: FSDP1's class, wired from the layers beneath."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatparam.api import BackwardPrefetch, CPUOffload, ShardingStrategy
from flatparam.auto_wrap import wrap_below
from flatparam.legacy_optim import WithLegacyOptim
from flatparam.private_names import WithPrivateNames
from flatparam.resolve import Arguments, resolve
from flatparam.sharding import unit_for
from flatparam.wrapper_settings import WithSettings
from flatparam.wrapper_state import WithState, wrappers_in
from flatparam_comm import Collectives, RanksOnly, engine_of, process_group_of
from flatparam_core import FSDP_WRAPPED_MODULE, FlatParamError, FlatParameter, clean_fqn, owner_of
from flatparam_runtime import (
    HookStage,
    Phase,
    Unit,
    clip_grad_norm_,
    holder_of,
    in_range,
    no_sync,
    refuse_in_a_pass,
    register_forward_method,
    shown,
    summon_full_params,
    unit_of,
    units_in,
    untraced,
)

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(WithState, WithLegacyOptim, WithSettings, WithPrivateNames):
    """Shard a module's parameters, gradients and optimizer states over data-parallel ranks.

    A drop-in successor of `torch.distributed.fsdp.FullyShardedDataParallel`: the arguments are FSDP1's and
    mean the same. Every rank wraps an equal module; the parameters of the module that no unit inside it holds
    become one unit.

    Args:
        module: wrapped in place.
        process_group: the ranks to shard over: a `ProcessGroup`, a `Collectives` of `flatparam_comm`, or
            `None` for the default group (in a world of threads: for that world). For the hybrid strategies a pair: the
            ranks to shard over, and those that hold copies of a shard; `None` (with a policy): inside and across nodes.
        sharding_strategy: `FULL_SHARD` (default) frees full parameters between forward and backward,
            `SHARD_GRAD_OP` after the backward only; `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2` do the same inside groups
            of ranks and hold copies across them; `NO_SHARD` holds everything everywhere.
        cpu_offload: whether shards, their gradients and so the optimizer live in CPU memory.
        auto_wrap_policy: which submodules become units of their own; see `flatparam.wrap`.
        backward_prefetch: when the next unit is gathered in the backward pass.
        mixed_precision: the dtypes of computation, reduction, buffers and inputs.
        ignored_modules: left whole, with all below them.
        param_init_fn: gives a module on the meta device values; by default its `reset_parameters()`.
        device_id: where the parameters are to live.
        sync_module_states: start from rank 0's parameters and buffers.
        forward_prefetch: gather the next unit while this one computes, in the order of the pass before; a number
            gathers as many units ahead.
        limit_all_gathers: accepted for FSDP1's sake; there is nothing to limit, since memory is taken and given back in
            the order of the computation (see `docs/differences-from-torch.md`).
        use_orig_params: whether `parameters()` lists the original parameters, or one flat parameter for each unit.
        ignored_states: modules or parameters that are left whole.
        device_mesh: the ranks to shard over, as a mesh of one dimension; of two (replicate, shard) for the hybrid
            strategies.
        broadcast_buffers: start every training forward from rank 0's buffers. Not in FSDP1.
        clean_names: have `named_parameters()` and `named_buffers()` give the names of the unwrapped module always, not
            only while parameters are summoned. Not in FSDP1.

    Raises:
        ValueError, TypeError: for arguments that do not fit each other or the module, naming them.
    """

    sharding_strategy: ShardingStrategy
    mixed_precision: Any
    cpu_offload: CPUOffload
    _unit: Unit
    _clean_names: bool

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Any = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
        *,
        broadcast_buffers: bool = False,
        clean_names: bool = False,
    ) -> None:
        """See the class."""
        given = Arguments.among(locals())
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"a {type(module).__name__} has no forward pass, so its parameters are gathered for each call of a "
                "module inside it; wrap those, or the module around it",
                stacklevel=2,
            )
        resolved = resolve(module, given)
        if auto_wrap_policy is not None:
            wrap_below(type(self), module, given, resolved)
        unit = unit_for(module, resolved)
        # None of these is a parameter or a module, which nn.Module's __setattr__ would look for in each.
        vars(self).update(
            sharding_strategy=resolved.strategy,
            mixed_precision=resolved.mixed_precision,
            cpu_offload=CPUOffload(resolved.plan.storage_device is not None),
            limit_all_gathers=limit_all_gathers,
            _unit=unit,
            _clean_names=clean_names,
        )
        self._attach_state()
        self._modules[FSDP_WRAPPED_MODULE] = module

    # The wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation-checkpointing wrapper around it."""
        inner = self._modules[FSDP_WRAPPED_MODULE]
        assert inner is not None, "the wrapper always has its module"
        checkpointed = inner._modules.get("_checkpoint_wrapped_module")
        return inner if checkpointed is None else checkpointed

    @partial(untraced, with_callees=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with its full parameters in place."""
        inner = self._modules[FSDP_WRAPPED_MODULE]
        assert inner is not None, "the wrapper always has its module"
        return in_range("forward", partial(inner, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Look `name` up in the wrapped module where the wrapper has no such attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(FSDP_WRAPPED_MODULE)
            if inner is None or not hasattr(inner, name):
                raise
            return getattr(inner, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]  # type: ignore[index]  # the user says that it can be

    # Facts

    @property
    def process_group(self) -> Any:
        """The ranks that the parameters are sharded over."""
        engine = engine_of(self._group)
        return engine.group if isinstance(engine, RanksOnly) else process_group_of(engine) or engine

    @property
    def _group(self) -> Collectives:
        """The ranks that the parameters are sharded over; where they are not, those that hold copies of them."""
        return self._unit.plan.topology.group

    @property
    def rank(self) -> int:
        """This process's rank among those that the parameters are sharded over."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks the parameters are sharded over."""
        return self._group.size

    @property
    def compute_device(self) -> torch.device:
        """Where the unit's parameters live."""
        return self._unit.device

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameters that this wrapper holds, in both settings of `use_orig_params`."""
        return [handle.flat_param for handle in self._unit.handles]

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one, as far as any forward pass has shown."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in `module`, itself included, depth first, each once.

        Args:
            root_only: the outermost ones, without those that a forward pass has shown to be inside another.
        """
        found = wrappers_in(module, root_only=root_only)
        wrappers = [wrapper for wrapper in found if isinstance(wrapper, FullyShardedDataParallel)]
        return [wrapper for wrapper in wrappers if wrapper._is_root] if root_only else wrappers

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside with its full parameters in place, and keep what it changes.

        Every rank calls it, and keeps its own part of its own changes: seed them alike.
        """
        if self._unit.summoned is not None:
            return super().apply(fn)
        with summon_full_params(self):
            return super().apply(fn)

    # Training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication; the first backward pass outside reduces the sum."""
        with no_sync(self):
            yield

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the total norm of the gradients of all ranks; every rank calls it. Returns the norm before clipping.

        Args:
            error_if_nonfinite: raise, on every rank, for a norm that is not finite, and change nothing.
            foreach: see `torch.nn.utils.clip_grad_norm_`.
        """
        return clip_grad_norm_(
            self, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite, foreach=foreach
        )

    def register_comm_hook(
        self, state: object, hook: Callable[..., Any] | None, *, stage: HookStage = "reduce"
    ) -> None:
        """Have `hook` called instead of a collective of this unit and of all units inside.

        Args:
            state: passed to the hook.
            hook: for `"reduce"`, FSDP1's: `(state, gradient, shard to write)`, or `(state, gradient)` in place where
                nothing is sharded; it averages too. For `"all_reduce"`: `(state, shard of the gradient)`, in place,
                over the copies of a shard; it averages too. For `"all_gather"`: `(state, shard, full to write)`.
                `None` takes the hook away, so that another can be registered.

        Raises:
            ValueError: if it cannot be called.
            AssertionError: if a unit has a hook for this stage already. In either case none is registered.
        """
        if hook is not None and not callable(hook):
            raise ValueError(f"expected a communication hook that can be called, found {type(hook).__name__}")
        if hook is not None:
            for unit in units_in(self):
                unit.reducer.hooks.check_free(stage, unit.name)
        for unit in units_in(self):
            whole = stage == "reduce" and unit.plan.topology.shard.size == 1
            unit.reducer.hooks.set(stage, state, hook, in_place=stage == "all_reduce" or whole)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward passes sum gradients over the copies of a shard, or only inside the shard groups.

        FSDP2's method. What was not summed waits, sharded, for the next pass that sums.
        """
        for unit in units_in(self) if recurse else (self._unit,):
            unit.sum_copies(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of the gradients by `factor` instead of by the number of ranks. FSDP2's method."""
        if factor is not None and not factor > 0:
            raise ValueError(f"expected a divide factor above zero, found {factor!r}")
        for unit in units_in(self):
            unit.divide_by(factor)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Gather the units of `modules` when this unit's forward begins, instead of what the last pass suggests."""
        self._unit.prefetch_in_forward(None if modules is None else [_unit_of(module) for module in modules])

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Gather the units of `modules` when this unit's backward begins, instead of what the forward suggests."""
        self._unit.prefetch_in_backward(None if modules is None else [_unit_of(module) for module in modules])

    @staticmethod
    def register_forward_method(module: nn.Module, name: str) -> None:
        """Have the method `name` of a wrapped module, or of one inside, find full parameters, as `forward` does."""
        register_forward_method(_inner(module), name)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Show full parameters under their own names inside the context; every rank enters it.

        See `flatparam_runtime.summon_full_params` for what can be done inside.

        Args:
            recurse: those of the units inside too.
            writeback: keep what is changed inside; each rank keeps its own part.
            rank0_only: show them on rank 0 only, whose changes are kept.
            offload_to_cpu: show them in CPU memory.
            with_grads: show full gradients too.
        """
        with summon_full_params(
            _inner(module),
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As any module's; while full parameters are summoned, under the names that the unwrapped module has.

        Full parameters are listed inside their unit's forward pass, and while they are summoned; else what an optimizer
        holds, also where a unit keeps full parameters in memory from the forward to the backward pass.
        """
        for name, parameter in self._named(super().named_parameters(prefix, recurse, remove_duplicate)):
            listed = _listed(parameter)
            if listed is not None:
                yield name, listed

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As any module's; while full parameters are summoned, under the names that the unwrapped module has."""
        yield from self._named(super().named_buffers(prefix, recurse, remove_duplicate))

    def _named(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        clean = self._clean_names or self._unit.summoned is not None or self._unit.phase is Phase.INSPECTING
        for name, value in pairs:
            yield (clean_fqn(name) if clean else name), value

    def _fqn_modifiers(self) -> dict[str, str]:
        """Refuse torch's functions for distributed state, which ask each module for this, and would save parts.

        Raises:
            FlatParamError: on every rank, naming the functions to call.
        """
        raise FlatParamError(
            f"rank {self.rank}: torch.distributed.checkpoint.state_dict does not know flatparam's units, and would "
            "take this rank's parts for the whole: call the function of this name of flatparam.checkpoint.state_dict "
            "(get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, "
            "set_optimizer_state_dict, set_state_dict), with the same arguments"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the shards as wholes; the original parameters follow as views of them."""
        units = units_in(self)
        for unit in units:
            refuse_in_a_pass(unit)
            unit.reshard()
        handles = [handle for unit in units for handle in unit.handles]
        with torch.no_grad():
            for handle in handles:
                handle.apply(fn)
        with contextlib.ExitStack() as stack:
            for unit in units:
                stack.enter_context(
                    shown(unit, [[None] * len(handle.layout.slots) for handle in unit.handles])
                )
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _listed(parameter: nn.Parameter) -> nn.Parameter | None:
    """What stands for `parameter` in a list of parameters; `None` where that is the flat parameter."""
    owner = owner_of(parameter)
    if owner is None:
        return parameter
    handle, index = owner
    unit = holder_of(handle)
    if unit is None or unit.is_needed or unit.phase is Phase.INSPECTING:
        return parameter
    held = handle.exposure.parameters()
    return held[index] if held[0] is not handle.flat_param else None


def _inner(module: nn.Module) -> nn.Module:
    """The module that is the unit, where `module` is its wrapper."""
    if isinstance(module, FullyShardedDataParallel):
        return module._modules[FSDP_WRAPPED_MODULE] or module
    return module


def _unit_of(module: nn.Module) -> Unit:
    unit = unit_of(_inner(module))
    if unit is None:
        raise ValueError(f"expected a wrapped module, found a {type(module).__name__} that is not")
    return unit
