"""The wrapper: FSDP1's class, wired from the layers beneath."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from flatparam import placement, state_dicts
from flatparam.api import BackwardPrefetch, ShardingStrategy, StateDictSettings
from flatparam.auto_wrap import wrap_below
from flatparam.errors import NotYetSupportedError
from flatparam.resolve import resolve
from flatparam_comm import ProcessGroupCollectives
from flatparam_core import FSDP_WRAPPED_MODULE, FlatParameter, FlatParamHandle, clean_fqn
from flatparam_runtime import (
    Phase,
    clip_grad_norm_,
    no_sync,
    shard_module,
    summon_full_params,
    tree_of,
    units_in,
)
from flatparam_state import load_optimizer_state, optimizer_state_dict

__all__ = ["FullyShardedDataParallel"]

_NOT_YET: Final = frozenset(
    {
        "flatten_sharded_optim_state_dict",
        "full_optim_state_dict",
        "register_comm_hook",
        "rekey_optim_state_dict",
        "scatter_full_optim_state_dict",
        "shard_full_optim_state_dict",
        "sharded_optim_state_dict",
    }
)
"""Methods of FSDP1's that this version has not."""


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer states over data-parallel ranks.

    A drop-in successor of `torch.distributed.fsdp.FullyShardedDataParallel`: the arguments are FSDP1's and
    mean the same. Every rank wraps an equal module; the parameters of the module that no unit inside it holds
    become one unit.

    Args:
        module: wrapped in place.
        process_group: the ranks to shard over: a `ProcessGroup`, a `Collectives` of `flatparam_comm`, or
            `None` for the default group (in a world of threads: for that world).
        sharding_strategy: `FULL_SHARD` (default) frees full parameters between forward and backward,
            `SHARD_GRAD_OP` after the backward only.
        auto_wrap_policy: which submodules become units of their own; see `flatparam.wrap`.
        backward_prefetch: when the next unit is gathered in the backward pass.
        ignored_modules: left whole, with all below them.
        device_id: where the parameters are to live.
        sync_module_states: start from rank 0's parameters and buffers.
        forward_prefetch: gather the next unit while this one computes, in the order of the pass before.
        limit_all_gathers: accepted for FSDP1's sake; there is nothing to limit, since memory is taken and given back in
            the order of the computation (see `docs/differences-from-torch.md`).
        use_orig_params: whether `parameters()` lists the original parameters, or one flat parameter for each unit.
        ignored_states: modules or parameters that are left whole.
        device_mesh: the ranks to shard over, as a mesh of one dimension.

    Raises:
        NotYetSupportedError: for what FSDP1 has and this version has not; nothing is ignored in silence.
    """

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
    ) -> None:
        """See the class."""
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"a {type(module).__name__} has no forward pass, so nothing gathers the parameters of "
                "this unit; wrap the "
                "modules inside it, or the module around it",
                stacklevel=2,
            )
        arguments: dict[str, Any] = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "ignored_modules": ignored_modules,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "ignored_states": ignored_states,
            "device_mesh": device_mesh,
        }
        resolved = resolve(module, **arguments)
        placement.refuse_meta(module, resolved.ignored)
        if auto_wrap_policy is not None:
            # Those below share what was resolved here: the group, and what is ignored with all below it.
            arguments |= {"process_group": resolved.plan.topology, "device_mesh": None}
            arguments |= {"ignored_states": resolved.ignored, "ignored_modules": None}
            wrap_below(type(self), module, auto_wrap_policy, resolved.ignored, arguments)
        placement.move(module, resolved.device, resolved.ignored)
        if resolved.sync_module_states:
            placement.synchronise(module, resolved.plan.topology.shard, resolved.ignored)
        self.sharding_strategy = resolved.strategy
        self._unit = shard_module(
            module,
            resolved.plan,
            ignored_modules=resolved.ignored.modules,
            ignored_parameters=resolved.ignored.parameters,
            device=resolved.device,
        )
        self._settings = state_dicts.default_settings()
        self._modules[FSDP_WRAPPED_MODULE] = module
        loading = state_dicts.Loading()
        self.register_load_state_dict_pre_hook(loading.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(loading.after)  # type: ignore[no-untyped-call]

    # The wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation-checkpointing wrapper around it."""
        inner = self._modules[FSDP_WRAPPED_MODULE]
        assert inner is not None, "the wrapper always has its module"
        checkpointed = inner._modules.get("_checkpoint_wrapped_module")
        return inner if checkpointed is None else checkpointed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with its full parameters in place."""
        return self._modules[FSDP_WRAPPED_MODULE](*args, **kwargs)  # type: ignore[misc]  # never None

    def __getattr__(self, name: str) -> Any:
        """Look `name` up in the wrapped module where the wrapper has no such attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _NOT_YET:
                raise AttributeError(
                    f"FullyShardedDataParallel.{name} is not supported by this version of flatparam"
                ) from None
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
        shard = self._unit.plan.topology.shard
        while not isinstance(shard, ProcessGroupCollectives) and hasattr(shard, "inner"):
            shard = shard.inner
        return shard.group if isinstance(shard, ProcessGroupCollectives) else shard

    @property
    def rank(self) -> int:
        """This process's rank among those that the parameters are sharded over."""
        return self._unit.plan.topology.shard.rank

    @property
    def world_size(self) -> int:
        """How many ranks the parameters are sharded over."""
        return self._unit.plan.topology.shard.size

    @property
    def compute_device(self) -> torch.device:
        """Where the unit's parameters live."""
        return self._unit.handles[0].flat_param.device if self._unit.handles else torch.device("cpu")

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._unit.handles[0] if self._unit.handles else None

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._handle.flat_param if self._handle else None

    @property
    def _is_root(self) -> bool:
        return self.check_is_root()

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one, as far as any forward pass has shown."""
        return tree_of(self._unit).root is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in `module`, itself included, depth first, each once; `root_only`: the outermost ones."""
        found: list[FullyShardedDataParallel] = []
        seen: set[nn.Module] = set()
        stack = [module]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            if isinstance(current, FullyShardedDataParallel):
                found.append(current)
                if root_only:
                    continue
            stack.extend(reversed(list(current.children())))
        return found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside with its full parameters in place, and keep what it changes.

        Every rank calls it, and keeps its own part of its own changes: seed them alike.
        """
        if self._unit.phase is Phase.INSPECTING:
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
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm of the gradients of all ranks; every rank calls it. Returns the norm before clipping."""
        return clip_grad_norm_(self, float(max_norm), float(norm_type))

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

        Args:
            recurse: those of the units inside too.
            writeback: keep what is changed inside; each rank keeps its own part.

        Raises:
            NotYetSupportedError: for the other three arguments.
        """
        _refuse(
            rank0_only=rank0_only or None,
            offload_to_cpu=offload_to_cpu or None,
            with_grads=with_grads or None,
        )
        if isinstance(module, FullyShardedDataParallel):
            module = module._modules[FSDP_WRAPPED_MODULE] or module  # which is the unit
        with summon_full_params(module, recurse=recurse, writeback=writeback):
            yield

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As any module's; while full parameters are summoned, under the names that the unwrapped module has."""
        yield from self._named(super().named_parameters(prefix, recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As any module's; while full parameters are summoned, under the names that the unwrapped module has."""
        yield from self._named(super().named_buffers(prefix, recurse, remove_duplicate))

    def _named(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        clean = self._unit.phase is Phase.INSPECTING
        for name, value in pairs:
            yield (clean_fqn(name) if clean else name), value

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for handle in (handle for unit in units_in(self) for handle in unit.handles):
            shard = handle.flat_param.detach()
            changed = fn(shard)
            if (changed.dtype, changed.device) != (shard.dtype, shard.device):
                raise NotYetSupportedError(
                    f"moving or casting a wrapped module (here to {changed.dtype} on {changed.device})",
                    "move and cast it before it is wrapped",
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # State

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings | None:
        """Choose the form of the state of every wrapper in `module`; returns the settings before."""
        settings = state_dicts.resolve_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = FullyShardedDataParallel.get_state_dict_type(module) if wrappers else None
        for wrapper in wrappers:
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the wrappers in `module`, which must agree.

        Raises:
            AssertionError: where they differ.
        """
        settings = [wrapper._settings for wrapper in FullyShardedDataParallel.fsdp_modules(module)]
        assert all(s == settings[0] for s in settings), (
            "the wrappers in this module have different state dict types"
        )
        return settings[0] if settings else state_dicts.default_settings()

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """Choose the form of the state inside the context; also an exception restores what was before."""
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = [wrapper._settings for wrapper in wrappers]
        FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before, strict=True):
                wrapper._settings = settings

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a full state dict, which every rank passes and of which each copies its own part."""
        return super().load_state_dict(state_dicts.with_inner_versions(self, state_dict), *args, **kwargs)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The state of the module as if it were not wrapped, in the form that was chosen; every rank calls it."""
        if args:  # torch's own state_dict still takes these three by position
            destination, prefix, keep_vars = (*args, destination, prefix, keep_vars)[: len(args)] + (
                (destination, prefix, keep_vars)[len(args) :]
            )
        state = destination
        if state is None:
            state = cast(Any, OrderedDict())
            state._metadata = OrderedDict()  # where torch notes versions
        with state_dicts.saving(self, self._settings, state, prefix):
            super().state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        return state

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, in full shapes; every rank calls it."""
        _refuse(optim_state_dict=optim_state_dict, group=group)
        config = FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config
        return optimizer_state_dict(model, optim, **state_dicts.wants(config))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part of a full optimizer state (which every rank passes), for `optim.load_state_dict`."""
        _refuse(is_named_optimizer=is_named_optimizer or None, group=group)
        state = load_optimizer_state(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotYetSupportedError(f"{name}={value!r}", "leave it out")
