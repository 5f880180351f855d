"""From FSDP1's arguments to the plan of a unit, for a whole tree before one is wrapped: the only place that compares
strategies.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.compat import as_config, as_enum
from flatparam.resolving.arguments import Arguments, Environment, carriage_of
from flatparam.resolving.groups import resolve_groups
from flatparam.resolving.parameters import Ignored, ResolvedRules, resolve_device, resolve_ignored, resolve_rules
from flatparam.wrap import chosen_by
from flatparam_comm import Topology
from flatparam_core import Precision, clean_fqn, owner_of
from flatparam_runtime import BackwardOrder, BufferDtype, Casting, PrefetchPlan, UnitPlan, unit_of, warn_caller

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

_FLAGS: Final = ("sync_module_states", "limit_all_gathers", "use_orig_params", "broadcast_buffers", "clean_names")

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


def _warn_of_calls(module: nn.Module) -> None:
    """Warn of a module that is not called when its parameters are used, since its calls would gather them ahead."""
    name = type(module).__name__
    is_called = getattr(type(module), "forward", None) is not nn.Module.forward  # that of a scripted module raises
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not is_called:
        text = (
            f"a {name} has no forward pass, so its parameters are gathered for each call of a module inside it; wrap "
            "those, or the module around it"
        )
    elif isinstance(module, (nn.ParameterList, nn.ParameterDict)) and not is_called:
        text = (
            f"a {name} has no forward pass, so its parameters are gathered when a forward pass reads one, and never "
            "ahead; wrap the module around it instead"
        )
    elif isinstance(module, NonDynamicallyQuantizableLinear):
        text = (
            f"nn.MultiheadAttention reads the parameters of its {name} and does not call it, so they are gathered at "
            "the read, and never ahead; wrap the nn.MultiheadAttention instead"
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
    asked = ShardingStrategy.FULL_SHARD
    if arguments.sharding_strategy is not None:
        asked = as_enum(ShardingStrategy, arguments.sharding_strategy, "sharding_strategy")
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
    cpu_offload: Any = arguments.cpu_offload
    offload = cpu_offload is not None and as_config(CPUOffload, cpu_offload, "cpu_offload").offload_params
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
    # A cast copy of what a rank has whole is made again without any traffic.
    frees_early = _FREES_EARLY[strategy] or (
        strategy is ShardingStrategy.NO_SHARD and precision.param_dtype is not None
    )
    plan = UnitPlan(
        topology,
        free_after_forward=frees_early,
        keeps_last=True,
        overlaps_reductions=None,
        free_after_unsynced_backward=frees_early,
        prefetch=resolve_prefetch(arguments.forward_prefetch, arguments.backward_prefetch),
        casting=casting,
        buffer_dtype=buffer_dtype,
        full_precision_in_eval=environment.full_precision_in_eval,
        storage_device=torch.device("cpu") if offload else None,
        notices_replacement=not environment.skip_writeback_check,
        broadcast_buffers=bool(arguments.broadcast_buffers),
        use_orig_params=bool(arguments.use_orig_params),
        nonfinite=arguments.nonfinite,
        **carriage_of(precision, arguments.reduction, arguments.wire),
    )
    mixed = MixedPrecision(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    if arguments.mixed_precision is not None:
        mixed = as_config(MixedPrecision, arguments.mixed_precision, "mixed_precision")
    return Resolved(arguments, strategy, plan, ignored, device, mixed, environment, inherited, rules)


def _warn_of_no_shard(asked: ShardingStrategy, arguments: Arguments, topology: Topology) -> None:
    """Say once for a tree of wrappers that `NO_SHARD` is deprecated; one rank shards nothing in any case."""
    is_passed_on = isinstance(arguments.process_group, Topology)
    if asked is ShardingStrategy.NO_SHARD and not is_passed_on and topology.data_parallel_size > 1:
        warn_caller("NO_SHARD is deprecated, as in torch: it does what DistributedDataParallel does", FutureWarning)


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


@final
@attrs.frozen(eq=False)
class ResolvedTree:
    """The settings of a module, and of those inside that a policy chose."""

    root: Resolved
    inside: Mapping[nn.Module, Resolved] = attrs.field(factory=dict)


def resolve_tree(
    wrapper: type[nn.Module], module: nn.Module, arguments: Arguments, offered: Resolved | None = None
) -> ResolvedTree:
    """Return the settings of `module`, and of what the policy chooses inside it; nothing is changed.

    What is wrapped already stays as it is, and nothing inside it is wrapped again.

    Args:
        wrapper: the class that wraps.
        offered: the settings that the wrapper around this one resolved for it, if it did; a subclass may have changed
            the arguments since.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    if offered is not None and arguments.are(offered.asked):
        return ResolvedTree(offered)
    root = resolve(module, arguments, None if offered is None else offered.inherited)
    if offered is None:
        _warn_of_shared_memory(module)
    if arguments.auto_wrap_policy is None:
        return ResolvedTree(root)
    wrapped = {child for child in module.modules() if isinstance(child, wrapper) or unit_of(child) is not None}
    inside = {child for outer in wrapped for child in outer.modules()}
    left_out = root.ignored.modules | inside
    passed_on = _passed_on(root)
    kwargs = passed_on.by_name()
    targets = chosen_by(
        arguments.auto_wrap_policy,
        module,
        ignored_modules=left_out,
        ignored_parameters=root.ignored.parameters,
        kwargs=kwargs,
    )
    targets = {child: chosen for child, chosen in targets.items() if child not in inside}
    in_full_precision = _in_full_precision(module, root, left_out)
    for child in in_full_precision:
        targets[child] = {**targets.get(child, kwargs), "mixed_precision": None}
    _check_names(targets)
    return ResolvedTree(
        root,
        {
            child: resolve(
                child,
                Arguments(**chosen),
                Inherited(
                    root.ignored,
                    root.environment,
                    passed_on,
                    root.is_left_out or child in in_full_precision,
                    root.rules,
                ),
            )
            for child, chosen in targets.items()
        },
    )


def _warn_of_shared_memory(module: nn.Module) -> None:
    """Warn of parameters that lie in the same memory, but are different objects: they are tied only until now."""
    spans = []
    for name, parameter in module.named_parameters():
        is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        if not is_plain or parameter.is_meta or not parameter.numel() or owner_of(parameter) is not None:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = parameter.data_ptr()
        spans.append((str(parameter.device), start, start + (reach + 1) * parameter.itemsize, name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            warnings.warn(
                f"the parameters {clean_fqn(name)!r} and {clean_fqn(other)!r} are different objects in one memory, and "
                "are not tied any more once they are sharded; assign one parameter to both modules to tie them, or "
                "give each memory of its own",
                stacklevel=4,
            )


def _check_names(targets: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    known = attrs.fields_dict(Arguments)
    for module, chosen in targets.items():
        for name in chosen:
            if name not in known:
                raise TypeError(
                    f"auto_wrap_policy: expected arguments of FullyShardedDataParallel for a {type(module).__name__}, "
                    f"found {name!r}; they are {', '.join(known)}"
                )


def _passed_on(root: Resolved) -> Arguments:
    """Return the arguments of a wrapper for the modules inside, which share its groups and what is ignored."""
    return attrs.evolve(
        root.asked,
        process_group=root.plan.topology,
        device_mesh=None,
        auto_wrap_policy=None,
        sharding_strategy=root.strategy,
        ignored_states=root.ignored.parameters,
        ignored_modules=None,
        broadcast_buffers=False,
    )


def _in_full_precision(module: nn.Module, root: Resolved, left_out: Collection[nn.Module]) -> list[nn.Module]:
    """The modules inside of the classes that the mixed precision leaves out, as BatchNorm; a warning names them."""
    asked: Any = root.asked.mixed_precision
    if asked is None:
        return []
    classes = tuple(as_config(MixedPrecision, asked, "mixed_precision")._module_classes_to_ignore)
    found = [child for child in module.modules() if isinstance(child, classes) and child not in left_out]
    if found:
        names = sorted({type(child).__name__ for child in found})
        warnings.warn(
            f"mixed_precision leaves {', '.join(names)} out: they become units of their own that compute in fp32",
            stacklevel=4,
        )
    return [child for child in found if child is not module]
