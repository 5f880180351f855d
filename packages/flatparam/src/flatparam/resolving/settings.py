"""From FSDP1's arguments to the plan of a unit: the only place that compares strategies."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.compat import as_config, as_enum
from flatparam.resolving.arguments import Arguments
from flatparam.resolving.devices import resolve_device
from flatparam.resolving.environment import Environment
from flatparam.resolving.groups import resolve_groups
from flatparam.resolving.ignored import Ignored, resolve_ignored
from flatparam.resolving.rules import ResolvedRules, resolve_rules
from flatparam_comm import Topology
from flatparam_core import Precision
from flatparam_runtime import BackwardOrder, BufferDtype, Casting, PrefetchPlan, UnitPlan, warn_caller

__all__ = ["Inherited", "Resolved", "backward_prefetch_of", "resolve", "resolve_prefetch"]

_FREES_EARLY: Final = {
    ShardingStrategy.FULL_SHARD: True,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.NO_SHARD: False,
    ShardingStrategy.HYBRID_SHARD: True,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}

_BACKWARD_ORDER: Final = {
    None: BackwardOrder.NEVER,
    BackwardPrefetch.BACKWARD_PRE: BackwardOrder.BEFORE_COMPUTE,
    BackwardPrefetch.BACKWARD_POST: BackwardOrder.AFTER_COMPUTE,
}

_FLAGS: Final = (
    "sync_module_states",
    "limit_all_gathers",
    "use_orig_params",
    "broadcast_buffers",
    "clean_names",
)

_OF_ONE_DTYPE: Final = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""The layers that take no input of a dtype other than their weight's. If one is a unit, its inputs are cast in any
case: the module around may cast them to the dtype of its weight, as transformers' CLIP does, and finds the shard's."""
_FULL_PRECISION: Final = Casting(torch.float32, at_root=True, below_root=True, restores_outputs=True)
"""Compute in fp32: cast inputs up, and outputs back to the dtype of the inputs."""


@final
@attrs.frozen(eq=False)
class Inherited:
    """Settings that a module which a policy chose has from the wrapper around it, beside the arguments."""

    ignored: Ignored
    environment: Environment
    passed_on: Arguments
    """The arguments that the wrapper passes on, of which the policy may have changed some."""
    in_full_precision: bool = False
    """Whether mixed precision leaves the module out, so that it computes in fp32."""
    rules: ResolvedRules | None = None
    """The part of each parameter that stays on one rank."""

    def has_ignored(self, arguments: Arguments) -> bool:
        """Return whether `arguments` say nothing else about what is ignored than the wrapper around does."""
        same = arguments.ignored_states is self.passed_on.ignored_states
        return same and arguments.ignored_modules is None


@final
@attrs.frozen(eq=False)
class Resolved:
    """The settings of one module: all that the constructor's arguments mean for it."""

    asked: Arguments
    strategy: ShardingStrategy
    plan: UnitPlan
    ignored: Ignored
    device: torch.device | None
    """The device of full parameters; `None` leaves them where they are."""
    mixed_precision: MixedPrecision
    environment: Environment
    inherited: Inherited | None
    rules: ResolvedRules | None = None
    """The part of each parameter that stays on one rank; `None` cuts anywhere."""

    @property
    def is_left_out(self) -> bool:
        """Whether mixed precision leaves the module out, so that it computes in fp32."""
        is_asked_for = self.asked.mixed_precision is not None
        return self.inherited is not None and self.inherited.in_full_precision and not is_asked_for

    @property
    def sync_module_states(self) -> bool:
        """Whether the first rank's values are sent to the others."""
        return bool(self.asked.sync_module_states)

    @property
    def param_init_fn(self) -> Callable[[nn.Module], None] | None:
        """The function that gives a module on the meta device its values."""
        return self.asked.param_init_fn


def _warn_of_calls(module: nn.Module) -> None:
    """Warn of a module that is not called when its parameters are used, since calls gather them."""
    name = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        text = (
            f"a {name} has no forward pass, so its parameters are gathered for each call of a module inside it; wrap "
            "those, or the module around it"
        )
    elif isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        text = (
            f"a {name} has no forward pass, so nothing gathers its parameters for the code that reads them; wrap the "
            "module around it instead"
        )
    elif isinstance(module, NonDynamicallyQuantizableLinear):
        text = (
            f"nn.MultiheadAttention reads the parameters of its {name} and does not call it, so nothing gathers them; "
            "wrap the nn.MultiheadAttention instead"
        )
    else:
        return
    warn_caller(text)


def resolve(module: nn.Module, arguments: Arguments, inherited: Inherited | None = None) -> Resolved:
    """Resolve the wrapper's arguments for `module`; nothing is changed, so a refusal leaves everything as it was.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    _warn_of_calls(module)
    environment = Environment.read() if inherited is None else inherited.environment
    asked = _strategy(arguments)
    for name in _FLAGS:
        # "false" of a configuration file would count as true.
        if isinstance(getattr(arguments, name), str):
            raise ValueError(f"{name}: expected True or False, found {getattr(arguments, name)!r}")
    if arguments.param_init_fn is not None and not callable(arguments.param_init_fn):
        raise ValueError(f"param_init_fn: expected a function of a module, found {arguments.param_init_fn!r}")
    if inherited is not None and inherited.has_ignored(arguments):
        ignored = inherited.ignored
    else:
        ignored = resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states)
    if inherited is not None and arguments.layout is inherited.passed_on.layout:
        rules = inherited.rules
    else:
        is_whole_model = arguments.auto_wrap_policy is not None
        rules = resolve_rules(module, arguments.layout, is_whole_model=is_whole_model)
    offload = resolve_offload(arguments.cpu_offload)
    device = resolve_device(arguments.device_id, module, ignored, offload=offload)
    topology, strategy = resolve_groups(
        asked,
        arguments.process_group,
        arguments.device_mesh,
        has_policy=arguments.auto_wrap_policy is not None,
        environment=environment,
    )
    _warn_of_no_shard(asked, arguments, topology)
    is_left_out = inherited is not None and inherited.in_full_precision
    precision, casting, buffer_dtype = resolve_precision(arguments.mixed_precision, is_left_out=is_left_out)
    if type(module) in _OF_ONE_DTYPE:
        casting = attrs.evolve(casting, below_root=True)
    plan = UnitPlan(
        topology,
        free_after_forward=_FREES_EARLY[strategy],
        keeps_last=True,
        overlaps_reductions=None,
        free_after_unsynced_backward=_FREES_EARLY[strategy],
        prefetch=resolve_prefetch(arguments.forward_prefetch, arguments.backward_prefetch),
        precision=precision,
        casting=casting,
        buffer_dtype=buffer_dtype,
        full_precision_in_eval=environment.full_precision_in_eval,
        storage_device=torch.device("cpu") if offload else None,
        notices_replacement=not environment.skip_writeback_check,
        broadcast_buffers=bool(arguments.broadcast_buffers),
        use_orig_params=bool(arguments.use_orig_params),
        nonfinite=arguments.nonfinite,
    )
    mixed = MixedPrecision(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    if arguments.mixed_precision is not None:
        mixed = as_config(MixedPrecision, arguments.mixed_precision, "mixed_precision")
    return Resolved(arguments, strategy, plan, ignored, device, mixed, environment, inherited, rules)


def _strategy(arguments: Arguments) -> ShardingStrategy:
    if arguments.sharding_strategy is None:
        return ShardingStrategy.FULL_SHARD
    return as_enum(ShardingStrategy, arguments.sharding_strategy, "sharding_strategy")


def _warn_of_no_shard(asked: ShardingStrategy, arguments: Arguments, topology: Topology) -> None:
    """Say once for a tree of wrappers that `NO_SHARD` is deprecated; one rank shards nothing in any case."""
    is_passed_on = isinstance(arguments.process_group, Topology)
    if asked is ShardingStrategy.NO_SHARD and not is_passed_on and topology.data_parallel_size > 1:
        warn_caller(
            "NO_SHARD is deprecated, as in torch: it does what DistributedDataParallel does",
            FutureWarning,
        )


def resolve_offload(cpu_offload: Any) -> bool:
    """Return whether shards live in CPU memory.

    Raises:
        TypeError: for anything but a `CPUOffload` or `None`.
    """
    return cpu_offload is not None and as_config(CPUOffload, cpu_offload, "cpu_offload").offload_params


def resolve_prefetch(forward_prefetch: int, backward_prefetch: Any) -> PrefetchPlan:
    """Return how far ahead units are gathered: `forward_prefetch` is a number of units, or true for one.

    Without it, what the device does by itself.

    Raises:
        TypeError: for a backward prefetch that is not FSDP1's, or a forward prefetch that is no number.
    """
    if backward_prefetch is not None:
        backward_prefetch = as_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")
    try:
        ahead = operator.index(forward_prefetch)
    except TypeError:
        raise TypeError(
            f"forward_prefetch: expected True, False or a number of units, found {forward_prefetch!r}"
        ) from None
    return PrefetchPlan(ahead or None, _BACKWARD_ORDER[backward_prefetch])


def backward_prefetch_of(prefetch: PrefetchPlan) -> BackwardPrefetch | None:
    """FSDP1's name for the plan's order of the backward pass."""
    return next(asked for asked, order in _BACKWARD_ORDER.items() if order is prefetch.backward)


def resolve_precision(mixed_precision: Any, *, is_left_out: bool) -> tuple[Precision, Casting, BufferDtype]:
    """Return the dtypes of parameters and gradients, of inputs, and of buffers.

    Args:
        is_left_out: whether the mixed precision of the wrapper around leaves the module out.

    Raises:
        TypeError: for anything but a `MixedPrecision` or `None`.
    """
    if mixed_precision is None:
        return Precision(), _FULL_PRECISION if is_left_out else Casting(), None
    asked = as_config(MixedPrecision, mixed_precision, "mixed_precision")
    precision = Precision(asked.param_dtype, asked.reduce_dtype, asked.keep_low_precision_grads)
    casting = Casting(asked.param_dtype, asked.cast_root_forward_inputs, asked.cast_forward_inputs)
    return precision, casting, asked.buffer_dtype
