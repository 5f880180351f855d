"""`fully_shard`: make a module a unit, as FSDP2's arguments and policies say, and give it FSDP2's methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, overload

import torch
from torch import nn
from typing_extensions import TypedDict, Unpack

from flatparam.api import MixedPrecision, ShardingStrategy
from flatparam.in_place.module import FSDPModule, class_for, freeing
from flatparam.in_place.module_state import values_to_come
from flatparam.layout import LayoutPolicy, RuleFunction
from flatparam.resolving import arguments as given
from flatparam.resolving.arguments import Arguments, DeviceMesh, Environment, Ranks, Reduction, Wire
from flatparam.resolving.parameters import Ignored, resolve_device, resolve_ignored, resolve_rules
from flatparam.resolving.settings import Resolved
from flatparam.sharding.make_unit import shard_resolved
from flatparam.sharding.placement import own_modules
from flatparam.wrapper.interior import is_replicated, wrappers_in
from flatparam_comm import resolve_topology
from flatparam_core import FlatParamError, Precision
from flatparam_runtime import Casting, Nonfinite, UnitPlan, holder_of_parameter, unit_of

P = TypeVar("P")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module that `fully_shard` shards computes, reduces and returns; `None` keeps each as it is.

    Attributes:
        param_dtype: the dtype of full parameters, and so of computation. Optimizers step the parameters in their own
            dtype.
        reduce_dtype: the dtype in which gradients are reduced, and in which those of passes that do not reduce are
            added up; `None` is the dtype of computation.
        output_dtype: the dtype that floating-point outputs of the module's forward are cast to.
        cast_forward_inputs: whether floating-point inputs of the module's forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """The policy to offload nothing."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """The policy to keep shards, their gradients, and so the optimizer's states, in CPU memory.

    Attributes:
        pin_memory: whether that memory is pinned; beside an accelerator it always is, so `False` is refused there.
    """

    pin_memory: bool = True


class PolicyOfTorch(Protocol):
    """A policy for torch's own `fully_shard`: a dataclass with the name of one of these."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def as_policy(kind: type[P], value: Any, argument: str) -> P:
    """`value` as an instance of `kind`, or of a subclass of it; torch's dataclass of the same name is translated.

    Raises:
        TypeError: for anything else.
        ValueError: for an object of torch's that asks for something which the class of ours does not know.
    """
    if isinstance(value, kind):
        return value
    for candidate in (kind, *kind.__subclasses__()):
        if type(value).__name__ == candidate.__name__ and dataclasses.is_dataclass(value):
            return _translated(candidate, value, argument)
    raise TypeError(f"{argument}: expected a {kind.__name__} of flatparam or of torch, found {value!r}")


def _translated(kind: type[P], value: Any, argument: str) -> P:
    # Each candidate is a dataclass.
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for field in dataclasses.fields(value):
        if field.name not in known and getattr(value, field.name) != field.default:
            raise ValueError(
                f"{argument}: {field.name}={getattr(value, field.name)!r} is not supported; leave it at "
                f"{field.default!r}"
            )
    return kind(**{name: getattr(value, name) for name in known if hasattr(value, name)})


_NO_MIXED_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


class _Settings(TypedDict, total=False):
    """The arguments of `fully_shard` beside the module."""

    mesh: DeviceMesh | Ranks | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy | PolicyOfTorch
    offload_policy: OffloadPolicy | PolicyOfTorch
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: object
    nonfinite: Nonfinite
    reduction: Reduction
    wire: Wire
    layout: LayoutPolicy | RuleFunction | None
    values_later: bool


@overload
def fully_shard(module: nn.Module, **settings: Unpack[_Settings]) -> FSDPModule: ...


@overload
def fully_shard(module: Sequence[nn.Module], **settings: Unpack[_Settings]) -> Sequence[FSDPModule]: ...


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | Ranks | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | PolicyOfTorch = _NO_MIXED_PRECISION,
    offload_policy: OffloadPolicy | PolicyOfTorch = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
    nonfinite: Nonfinite = "ignore",
    reduction: Reduction = "default",
    wire: Wire = "default",
    layout: LayoutPolicy | RuleFunction | None = None,
    values_later: bool = False,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states over ranks, in place, and return the module.

    The function of this name in torch (FSDP2) has the same arguments. Call it for the blocks of a model first, and for
    the model last: each call makes a unit of the parameters that no call inside has taken. Their names stay; they are
    ordinary tensors, not `DTensor`s: between passes, this rank's part. The module's class becomes one that is derived
    from its own class and `FSDPModule`.

    Args:
        module: the module; of a list, each becomes a unit by itself (torch gathers the units of a list together).
        mesh: the ranks to shard over: a mesh of one dimension, of two (replicate, shard) with copies across the first,
            or what `process_group` of `FullyShardedDataParallel` takes; `None`: the default group, or that of threads.
        reshard_after_forward: `True` frees full parameters between forward and backward; `False` keeps them; `None`
            keeps those of the outermost module; a number: the backward pass gathers from so many neighbours.
        shard_placement_fn: may be given if it returns `None` or `Shard(0)`: no different dimension can be cut.
        mp_policy: the dtypes, as a `MixedPrecisionPolicy` of flatparam or of torch.
        offload_policy: `CPUOffloadPolicy()`, of flatparam or of torch, keeps shards and gradients in CPU memory.
        ignored_params: parameters that stay whole on every rank, and whose gradients are not reduced.
        dp_mesh_dims: must be `None`: pass the slice of the mesh as `mesh`.
        nonfinite: see `FullyShardedDataParallel`; not in FSDP2. The strictest of a model decides.
        reduction: see `FullyShardedDataParallel`; not in FSDP2.
        wire: see `FullyShardedDataParallel`; not in FSDP2.
        layout: see `FullyShardedDataParallel`; names are those below the module. Not in FSDP2.
        values_later: whether parameters on the meta device that nothing can begin wait for a load. Not in FSDP2.

    Returns:
        What was passed: the module, or the list.

    Raises:
        ValueError, TypeError: for arguments that do not fit each other or the module, naming them; nothing is changed.
    """
    if dp_mesh_dims is not None:
        raise ValueError("dp_mesh_dims: pass them as the mesh: mesh=mesh['shard'], or mesh=mesh['replicate', 'shard']")
    modules = [module] if isinstance(module, nn.Module) else list(module)
    for each in modules:
        _check_module(each)
    ignored = None if ignored_params is None else list(ignored_params)
    if shard_placement_fn is not None:
        _check_placements(modules, ignored or (), shard_placement_fn)
    found = [
        resolve_in_place(
            each,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored,
            nonfinite=nonfinite,
            reduction=reduction,
            wire=wire,
            layout=layout,
            values_later=values_later,
        )
        for each in modules
    ]
    for each, resolved in zip(modules, found, strict=True):
        if not values_later:
            _check_can_be_made(each, resolved)
    for sharded, resolved in zip(modules, found, strict=True):
        shard_resolved(sharded, resolved, by_hooks=True)
        sharded.__class__ = class_for(type(sharded))
    return module


def _check_module(module: Any) -> None:
    """Check that `module` can become a unit that is sharded in place.

    Raises:
        TypeError: if it is no module.
        ValueError: if it has no forward pass of its own.
        FlatParamError: if it, or a module inside, is sharded in a different way.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected a module or a list of modules, found {module!r}")
    name = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard: a {name} has no forward pass; shard the modules in it, one by one")
    if unit_of(module) is not None:
        raise FlatParamError(f"fully_shard: this {name} is sharded already; call it once for a module")
    if wrappers_in(module):
        raise FlatParamError(
            f"fully_shard: a module inside this {name} is wrapped in FullyShardedDataParallel; use one of the two for "
            "the whole model"
        )
    for parameter_name, parameter in module.named_parameters():
        holder = holder_of_parameter(parameter)
        if holder is not None and any(inside is module for inside in holder.module.modules()):
            raise FlatParamError(
                f"fully_shard: {parameter_name!r} of this {name} is in the unit of a module around it already, so "
                "nothing is left to shard; call fully_shard for the modules inside first, then for those around them"
            )
    for child_name, child in module.named_modules():
        if any(kind.__module__.startswith("torch.distributed.fsdp.") for kind in type(child).__mro__):
            raise FlatParamError(
                f"fully_shard: {child_name or name!r} is sharded by torch's FSDP already; use flatparam's fully_shard "
                "for every module"
            )


def _check_placements(
    modules: Iterable[nn.Module], ignored: Sequence[nn.Parameter], place: Callable[[nn.Parameter], Any]
) -> None:
    """Check that no parameter that is to be sharded is to be cut along a different dimension than the first.

    Raises:
        ValueError: naming the parameter that is.
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        if holder_of_parameter(parameter) is None and not any(parameter is each for each in ignored):
            placement = place(parameter)
            if placement is not None and not (hasattr(placement, "is_shard") and placement.is_shard(0)):
                raise ValueError(
                    f"shard_placement_fn: expected None or Shard(0) for {name!r}, found {placement!r}: flatparam cuts "
                    "no different dimension than the first; leave the function out"
                )


def _check_can_be_made(module: nn.Module, resolved: Resolved) -> None:
    """Check that what is on the meta device can be given values.

    Raises:
        ValueError: if a module there has no `reset_parameters()`.
    """
    for child in own_modules(module, resolved.ignored):
        is_deferred = any(p.is_meta and p not in resolved.ignored for p in child.parameters(recurse=False))
        if is_deferred and not callable(getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"fully_shard: a {type(child).__name__} is on the meta device and has no reset_parameters(), so "
                "nothing says what its values are; make it on a device, give its class the method, or use "
                "FullyShardedDataParallel with param_init_fn"
            )


def resolve_in_place(
    module: nn.Module,
    *,
    mesh: Any,
    reshard_after_forward: Any,
    mp_policy: object,
    offload_policy: object,
    ignored_params: Any,
    nonfinite: Nonfinite = "ignore",
    reduction: Reduction = "default",
    wire: Wire = "default",
    layout: Any = None,
    values_later: bool = False,
) -> Resolved:
    """Return the settings of `module`; see `fully_shard`.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    precision = as_policy(MixedPrecisionPolicy, mp_policy, "mp_policy")
    offload = as_policy(OffloadPolicy, offload_policy, "offload_policy")
    topology = resolve_topology(mesh)
    offloads = isinstance(offload, CPUOffloadPolicy)
    ignored = _ignored(module, ignored_params)
    device = resolve_device(_device_of(mesh), module, ignored, offload=offloads)
    if isinstance(offload, CPUOffloadPolicy) and not offload.pin_memory and _is_accelerator(device, module):
        raise ValueError("offload_policy: with an accelerator CPU memory is always pinned; pass CPUOffloadPolicy()")
    carriage = given.carriage_of(Precision(precision.param_dtype, precision.reduce_dtype), reduction, wire)
    carriage |= freeing(reshard_after_forward, topology, carriage.get("gathers"))
    plan = UnitPlan(
        topology,
        **carriage,
        overlaps_reductions=None,
        casting=_casting(precision),
        storage_device=torch.device("cpu") if offloads else None,
        use_orig_params=True,
        nonfinite=nonfinite,
    )
    mixed = MixedPrecision(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    return Resolved(
        Arguments(param_init_fn=values_to_come(module, ignored, parameters=values_later)),
        ShardingStrategy.FULL_SHARD,
        plan,
        ignored,
        device,
        mixed,
        Environment.read(),
        None,
        resolve_rules(module, layout),
    )


def _casting(policy: MixedPrecisionPolicy) -> Casting:
    casts = policy.cast_forward_inputs
    return Casting(
        policy.param_dtype, at_root=casts, below_root=casts, without_parameters=casts, output_dtype=policy.output_dtype
    )


def _ignored(module: nn.Module, ignored_params: Iterable[Any] | None) -> Ignored:
    found = list(ignored_params or ())
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise ValueError(f"ignored_params: expected parameters, found a {type(each).__name__}")
    for child in filter(is_replicated, module.modules()):
        found += child.parameters()
    return resolve_ignored(module, None, found) if found else Ignored()


def _device_of(mesh: Any) -> Any:
    """Return the device that a mesh says; `None` of anything else, which leaves parameters where they are."""
    kind = getattr(mesh, "device_type", None)
    if kind is None or kind == "cpu":
        return kind
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _is_accelerator(device: torch.device | None, module: nn.Module) -> bool:
    here = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return (device or here).type != "cpu"
