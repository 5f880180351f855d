"""From FSDP1's arguments to the plan of a unit: the only place that compares strategies."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.compat import as_config, as_enum
from flatparam.errors import NotYetSupportedError
from flatparam_comm import Topology, resolve_topology
from flatparam_runtime import BackwardOrder, PrefetchPlan, UnitPlan, unit_of

__all__ = ["Ignored", "Resolved", "resolve"]

_FREES_EARLY = {ShardingStrategy.FULL_SHARD: True, ShardingStrategy.SHARD_GRAD_OP: False}

_BACKWARD_ORDER = {
    None: BackwardOrder.NEVER,
    BackwardPrefetch.BACKWARD_PRE: BackwardOrder.BEFORE_COMPUTE,
    BackwardPrefetch.BACKWARD_POST: BackwardOrder.AFTER_COMPUTE,
}


def resolve_strategy(strategy: Any) -> ShardingStrategy:
    """The strategy asked for, FULL_SHARD by default.

    Raises:
        NotYetSupportedError: for one that this version has not.
    """
    chosen = ShardingStrategy.FULL_SHARD
    if strategy is not None:
        chosen = as_enum(ShardingStrategy, strategy, "sharding_strategy")
    if chosen not in _FREES_EARLY:
        raise NotYetSupportedError(f"sharding_strategy={chosen}", "use FULL_SHARD or SHARD_GRAD_OP")
    return chosen


def resolve_plan(
    *,
    process_group: Any,
    device_mesh: Any,
    strategy: ShardingStrategy,
    backward_prefetch: Any,
    forward_prefetch: bool,
    use_orig_params: bool,
) -> UnitPlan:
    """The plan of a unit.

    Raises:
        ValueError: where both a group and a mesh are given, or neither and nothing is initialised.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    topology = _topology(device_mesh if process_group is None else process_group)
    if backward_prefetch is not None:
        backward_prefetch = as_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")
    early = _FREES_EARLY[strategy]
    return UnitPlan(
        topology,
        free_after_forward=early,
        free_after_unsynced_backward=early,
        prefetch=PrefetchPlan(int(forward_prefetch), _BACKWARD_ORDER[backward_prefetch]),
        use_orig_params=use_orig_params,
    )


def _topology(where: Any) -> Topology:
    topology = where if isinstance(where, Topology) else resolve_topology(where)
    if topology.replicate is not None:
        raise NotYetSupportedError(
            f"sharding inside groups of ranks and replicating across them (process_group or device_mesh={where!r})",
            "pass one group of ranks, or a mesh of one dimension",
        )
    return topology


def check_unsupported(cpu_offload: Any, mixed_precision: Any, param_init_fn: Any) -> None:
    """Refuse what is not here yet.

    Raises:
        NotYetSupportedError: naming the argument.
    """
    if cpu_offload is not None and as_config(CPUOffload, cpu_offload, "cpu_offload").offload_params:
        raise NotYetSupportedError(
            f"cpu_offload={cpu_offload!r}", "pass None or CPUOffload(offload_params=False)"
        )
    if mixed_precision is not None:
        asked = as_config(MixedPrecision, mixed_precision, "mixed_precision")
        if (asked.param_dtype, asked.reduce_dtype, asked.buffer_dtype) != (None, None, None) or (
            asked.keep_low_precision_grads or asked.cast_forward_inputs
        ):
            raise NotYetSupportedError(
                f"mixed_precision={mixed_precision!r}", "pass None, or use torch.autocast"
            )
    if param_init_fn is not None:
        raise NotYetSupportedError(
            f"param_init_fn={param_init_fn!r}", "initialise the module on a real device first"
        )


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
class Resolved:
    """What the constructor's arguments come down to for one module."""

    strategy: ShardingStrategy
    plan: UnitPlan
    ignored: Ignored
    device: torch.device | None
    sync_module_states: bool


def resolve(
    module: nn.Module,
    process_group: Any = None,
    sharding_strategy: Any = None,
    cpu_offload: Any = None,
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: Any = None,
    ignored_modules: Any = None,
    param_init_fn: Any = None,
    device_id: Any = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = False,
    ignored_states: Any = None,
    device_mesh: Any = None,
) -> Resolved:
    """Resolve the wrapper's arguments for `module`; nothing is changed, so a refusal leaves everything as it was.

    Raises:
        NotYetSupportedError, ValueError, TypeError: naming the argument.
    """
    check_unsupported(cpu_offload, mixed_precision, param_init_fn)
    strategy = resolve_strategy(sharding_strategy)
    plan = resolve_plan(
        process_group=process_group,
        device_mesh=device_mesh,
        strategy=strategy,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        use_orig_params=use_orig_params,
    )
    ignored = resolve_ignored(module, ignored_modules, ignored_states)
    return Resolved(strategy, plan, ignored, resolve_device(device_id), sync_module_states)


def resolve_device(device_id: Any) -> torch.device | None:
    """The device that the unit's parameters are to live on; `None` leaves them where they are.

    Raises:
        ValueError: where `device_id` is no device.
    """
    if device_id is None:
        return None
    if not isinstance(device_id, (int, str, torch.device)):
        raise ValueError(f"device_id: expected an int, a string or a torch.device, found {device_id!r}")
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # the CPU has no index that means anything
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        warnings.warn(
            f"device_id={device_id!r} has no index: using the current device, {device}", stacklevel=4
        )
    return device


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """What the two arguments ask for, of which at most one may be given.

    Raises:
        TypeError: for something that is no module or parameter.
        ValueError: for both arguments, or a mix of modules and parameters.
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
            raise TypeError(f"{name}: expected an iterable of modules, found {type(item).__name__} in it")
        if any(unit_of(child) is not None for child in item.modules()):
            raise ValueError(
                f"{name} should not include wrapped modules: {type(item).__name__} is, or has one inside"
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
    below = frozenset(child for module in modules for child in module.modules())
    every = (*parameters, *(p for module in below for p in module.parameters(recurse=False)))
    return Ignored(below, frozenset(map(id, every)), tuple(every))
