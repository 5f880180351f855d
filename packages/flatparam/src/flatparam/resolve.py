"""From FSDP1's arguments to the plan of a unit: the only place that compares strategies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.compat import as_config, as_enum
from flatparam.environment import Environment
from flatparam.topologies import resolve_groups
from flatparam_comm import Topology
from flatparam_core import FSDP_WRAPPED_MODULE, Precision, each_module
from flatparam_runtime import BackwardOrder, BufferDtype, Casting, PrefetchPlan, UnitPlan, unit_of

__all__ = [
    "FULL_PRECISION",
    "Arguments",
    "Ignored",
    "Resolved",
    "backward_prefetch_of",
    "resolve",
    "resolve_prefetch",
]

_FREES_EARLY = {
    ShardingStrategy.FULL_SHARD: True,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.NO_SHARD: False,
    ShardingStrategy.HYBRID_SHARD: True,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}

_BACKWARD_ORDER = {
    None: BackwardOrder.NEVER,
    BackwardPrefetch.BACKWARD_PRE: BackwardOrder.BEFORE_COMPUTE,
    BackwardPrefetch.BACKWARD_POST: BackwardOrder.AFTER_COMPUTE,
}


class _FullPrecision:
    """What stands for `mixed_precision` where a policy takes a class of modules out of it."""

    def __repr__(self) -> str:
        return "FULL_PRECISION"


FULL_PRECISION: Final = _FullPrecision()
"""Compute in fp32: cast inputs up, and outputs back to the dtype of the inputs."""


@final
@attrs.frozen(eq=False)
class Ignored:
    """The modules, with all below them, and the parameters that are left whole."""

    modules: frozenset[nn.Module] = frozenset()
    parameter_ids: frozenset[int] = frozenset()
    parameters: tuple[nn.Parameter, ...] = ()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.parameter_ids


@final
@attrs.frozen(eq=False)
class Arguments:
    """The wrapper's arguments beside the module, as the caller passed them."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: bool = False
    forward_prefetch: int = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Any = None
    device_mesh: Any = None
    broadcast_buffers: bool = False
    clean_names: bool = False

    @classmethod
    def among(cls, names: Mapping[str, Any]) -> Self:
        """Those of `names` that are arguments."""
        return cls(**{field.name: names[field.name] for field in attrs.fields(cls)})

    def are(self, others: Arguments) -> bool:
        """Whether each is the same object."""
        names = (field.name for field in attrs.fields(type(self)))
        return all(getattr(self, name) is getattr(others, name) for name in names)

    def below(self, resolved: Resolved) -> dict[str, Any]:
        """The arguments for modules inside, which share the groups and what is ignored."""
        shared = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        shared |= {"process_group": resolved.plan.topology, "device_mesh": None, "auto_wrap_policy": None}
        shared |= {"sharding_strategy": resolved.strategy}
        return shared | {
            "ignored_states": resolved.ignored,
            "ignored_modules": None,
            "broadcast_buffers": False,
        }


@final
@attrs.frozen(eq=False)
class Resolved:
    """What the constructor's arguments come down to for one module.

    `device` is where full parameters live, `None` where they are already.
    """

    asked: Arguments
    strategy: ShardingStrategy
    plan: UnitPlan
    ignored: Ignored
    device: torch.device | None
    sync_module_states: bool
    mixed_precision: MixedPrecision
    param_init_fn: Callable[[nn.Module], None] | None


def resolve(module: nn.Module, arguments: Arguments, environment: Environment | None = None) -> Resolved:
    """Resolve the wrapper's arguments for `module`; nothing is changed, so a refusal leaves everything as it was.

    Args:
        environment: as it was read for the wrapper around this one; by default it is read now.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    checked = arguments.ignored_states
    if isinstance(checked, Resolved):  # by the wrapper around this one, when it checked what its policy chose
        arguments = attrs.evolve(arguments, ignored_states=checked.asked.ignored_states)
        if arguments.are(checked.asked):  # a subclass may pass on others
            return checked
    environment = environment or Environment.read()
    strategy = ShardingStrategy.FULL_SHARD
    if arguments.sharding_strategy is not None:
        strategy = as_enum(ShardingStrategy, arguments.sharding_strategy, "sharding_strategy")
    is_deprecated = strategy is ShardingStrategy.NO_SHARD and not isinstance(
        arguments.process_group, Topology
    )
    if arguments.param_init_fn is not None and not callable(arguments.param_init_fn):
        raise ValueError(f"param_init_fn: expected a function of a module, found {arguments.param_init_fn!r}")
    ignored = resolve_ignored(module, arguments.ignored_modules, arguments.ignored_states)
    offload = resolve_offload(arguments.cpu_offload)
    device = resolve_device(arguments.device_id, module, ignored, offload=offload)
    topology, strategy = resolve_groups(
        strategy,
        arguments.process_group,
        arguments.device_mesh,
        has_policy=arguments.auto_wrap_policy is not None,
        environment=environment,
    )
    if is_deprecated and topology.data_parallel_size > 1:  # one rank shards nothing in any case
        warnings.warn(
            "NO_SHARD is deprecated, as in torch: it does what DistributedDataParallel does",
            FutureWarning,
            stacklevel=4,
        )
    precision, casting, buffer_dtype = resolve_precision(arguments.mixed_precision)
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
    )
    return Resolved(
        arguments,
        strategy,
        plan,
        ignored,
        device,
        bool(arguments.sync_module_states),
        MixedPrecision(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
        if arguments.mixed_precision in (None, FULL_PRECISION)
        else as_config(MixedPrecision, arguments.mixed_precision, "mixed_precision"),
        arguments.param_init_fn,
    )


def resolve_offload(cpu_offload: Any) -> bool:
    """Whether shards live in CPU memory.

    Raises:
        TypeError: for anything but a `CPUOffload` or `None`.
    """
    return cpu_offload is not None and as_config(CPUOffload, cpu_offload, "cpu_offload").offload_params


def resolve_prefetch(forward_prefetch: int, backward_prefetch: Any) -> PrefetchPlan:
    """How far ahead units are gathered: `forward_prefetch` is a number of units, or true for one.

    Without it, what the device does by itself.

    Raises:
        TypeError: for a backward prefetch that is not FSDP1's.
    """
    if backward_prefetch is not None:
        backward_prefetch = as_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")
    return PrefetchPlan(int(forward_prefetch) or None, _BACKWARD_ORDER[backward_prefetch])


def backward_prefetch_of(prefetch: PrefetchPlan) -> BackwardPrefetch | None:
    """What FSDP1 calls the plan's order of the backward pass."""
    return next(asked for asked, order in _BACKWARD_ORDER.items() if order is prefetch.backward)


def resolve_precision(mixed_precision: Any) -> tuple[Precision, Casting, BufferDtype]:
    """The dtypes of parameters and gradients, of inputs, and of buffers.

    Raises:
        TypeError: for anything but a `MixedPrecision` or `None`.
    """
    if mixed_precision is None:
        return Precision(), Casting(), None
    if mixed_precision is FULL_PRECISION:
        return Precision(), Casting(torch.float32, at_root=True, below_root=True, restores_outputs=True), None
    asked = as_config(MixedPrecision, mixed_precision, "mixed_precision")
    precision = Precision(asked.param_dtype, asked.reduce_dtype, asked.keep_low_precision_grads)
    casting = Casting(asked.param_dtype, asked.cast_root_forward_inputs, asked.cast_forward_inputs)
    return precision, casting, asked.buffer_dtype


def resolve_device(
    device_id: Any, module: nn.Module, ignored: Ignored, *, offload: bool
) -> torch.device | None:
    """The device that full parameters are to live on; `None` leaves them where they are.

    Without `device_id`, parameters on the CPU and on one accelerator go to the accelerator; those on the meta device,
    and those whose shards are to be kept in CPU memory, to the current accelerator where there is one.

    Raises:
        TypeError: where `device_id` is nothing that names a device.
        ValueError: where parameters are on other accelerators.
    """
    asked = None if device_id is None else _device(device_id)
    found = {
        parameter.device
        for child in each_module(module)
        for parameter in child._parameters.values()
        if parameter is not None
        and parameter not in ignored
        and not getattr(parameter, "_fsdp_flattened", False)
    }
    accelerators = sorted({device for device in found if device.type not in ("cpu", "meta")}, key=str)
    others = [device for device in accelerators if asked is None or device != asked]
    if others and (asked is not None or len(others) > 1):
        wanted = "one device" if asked is None else f"device_id={asked}"
        raise ValueError(
            f"device_id: expected parameters on {wanted} or on the CPU, found some on {', '.join(map(str, others))}; "
            "move the module to one device, or pass that device"
        )
    if asked is not None:
        return asked
    if accelerators and len(found) > 1:
        return accelerators[0]
    if offload or torch.device("meta") in found:
        here = next((device for device in found if device.type != "meta"), torch.device("cpu"))
        if here.type == "cpu" and torch.accelerator.is_available():
            here = _device(torch.accelerator.current_device_index())
        return here
    return None


def _device(device_id: Any) -> torch.device:
    if not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(f"device_id: expected an int, a string or a torch.device, found {device_id!r}")
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # the CPU has no index that means anything
    if device.type != "meta" and not torch.get_device_module(device).is_available():
        raise ValueError(
            f"device_id: expected a device of this machine, found {device}, which torch cannot use here"
        )
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        warnings.warn(
            f"device_id={device_id!r} has no index: using the current device, {device}", stacklevel=4
        )
    return device


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """What the two arguments ask for, of which at most one may be given; units below an ignored module stay units.

    Raises:
        TypeError: for something that is no collection.
        ValueError: for both arguments, for something in one that is no module or parameter, for a mix of them, or for a
            module that is wrapped.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states exclude each other: pass one of them")
    if isinstance(ignored_states, Ignored):
        return ignored_states  # what a wrapper passes on to those that its policy makes
    name = "ignored_modules" if ignored_states is None else "ignored_states"
    items = list(_iterable(name, ignored_modules if ignored_states is None else ignored_states))
    if items and all(isinstance(item, nn.Parameter) for item in items) and name == "ignored_states":
        return _ignored((), items)
    if any(isinstance(item, nn.Parameter) for item in items) and any(isinstance(i, nn.Module) for i in items):
        raise ValueError("ignored_states: expected all modules or all parameters, found both")
    for item in items:
        if not isinstance(item, nn.Module):
            raise ValueError(f"{name}: expected an iterable of modules, found {type(item).__name__} in it")
        if FSDP_WRAPPED_MODULE in item._modules or unit_of(item) is not None:
            raise ValueError(
                f"{name} should not include wrapped modules, and this {type(item).__name__} is one"
            )
        if item is module:
            warnings.warn(f"{name} holds the module that is wrapped: none of it is sharded", stacklevel=4)
    return _ignored(items, ())


def _iterable(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected an iterable, found {type(value).__name__}")
    return value


def _ignored(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Ignored:
    below = frozenset(
        child for module in modules for child in each_module(module, lambda child: unit_of(child) is not None)
    )
    every = (*parameters, *(p for module in below for p in module.parameters(recurse=False)))
    return Ignored(below, frozenset(map(id, every)), tuple(every))
