"""The arguments of `fully_shard`, resolved to the settings of a unit; nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flatparam.api import MixedPrecision, ShardingStrategy
from flatparam.in_place.initialising import values_to_come
from flatparam.in_place.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, as_policy
from flatparam.resolving import (
    Arguments,
    Environment,
    Ignored,
    Resolved,
    resolve_device,
    resolve_ignored,
    resolve_rules,
)
from flatparam_comm import resolve_topology
from flatparam_core import Precision
from flatparam_runtime import Casting, Nonfinite, Topology, UnitPlan

__all__ = ["check_flag", "freeing", "resolve_in_place"]


def resolve_in_place(
    module: nn.Module,
    *,
    mesh: Any,
    reshard_after_forward: Any,
    mp_policy: object,
    offload_policy: object,
    ignored_params: Any,
    nonfinite: Nonfinite = "ignore",
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
        raise ValueError(
            "offload_policy: with an accelerator CPU memory is always pinned; pass CPUOffloadPolicy()"
        )
    plan = UnitPlan(
        topology,
        **freeing(reshard_after_forward, topology),
        overlaps_reductions=None,
        precision=Precision(precision.param_dtype, precision.reduce_dtype),
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


def freeing(reshard_after_forward: Any, topology: Topology) -> dict[str, Any]:
    """Return the fields of a plan that say whether the full parameters are freed between forward and backward.

    Raises:
        TypeError: for anything but a bool, an int or `None`.
        ValueError: for an int that is no number of ranks to gather from in the backward pass.
    """
    if reshard_after_forward is None:
        return {"free_after_forward": True, "keeps_outermost": True, "keeps_last": True}
    frees = reshard_after_forward
    if not isinstance(frees, int):
        raise TypeError(f"reshard_after_forward: expected a bool, an int or None, found {frees!r}")
    if not isinstance(frees, bool):
        frees = _as_bool(frees, topology.shard.size)
    return {"free_after_forward": frees, "keeps_outermost": False, "keeps_last": False}


def _as_bool(ranks: int, size: int) -> bool:
    if ranks < 1 or size % ranks:
        raise ValueError(
            f"reshard_after_forward: expected a divisor of the {size} ranks of the shard group, found {ranks}"
        )
    if ranks not in (1, size):
        raise ValueError(
            f"reshard_after_forward={ranks}: flatparam does not reshard to a part of the {size} ranks; pass True or "
            f"False, or a mesh of two dimensions whose shard dimension has {ranks} ranks"
        )
    return ranks == size


def check_flag(name: str, value: object) -> None:
    """Make sure that `value` is a bool.

    Raises:
        ValueError: for anything else; torch raises the same.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected a bool, found {value!r}")


def _casting(policy: MixedPrecisionPolicy) -> Casting:
    casts = policy.cast_forward_inputs
    return Casting(
        policy.param_dtype,
        at_root=casts,
        below_root=casts,
        without_parameters=casts,
        output_dtype=policy.output_dtype,
    )


def _ignored(module: nn.Module, ignored_params: Iterable[Any] | None) -> Ignored:
    if ignored_params is None:
        return Ignored()
    found = list(ignored_params)
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise ValueError(f"ignored_params: expected parameters, found a {type(each).__name__}")
    return resolve_ignored(module, None, found)


def _device_of(mesh: Any) -> Any:
    """Return the device that a mesh says; `None` of anything else, which leaves parameters where they are."""
    kind = getattr(mesh, "device_type", None)
    if kind is None or kind == "cpu":
        return kind
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _is_accelerator(device: torch.device | None, module: nn.Module) -> bool:
    here = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return (device or here).type != "cpu"
