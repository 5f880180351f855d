"""FSDP2's `fully_shard`: flatparam's, with chunks of rows and parameters that are `DTensor`s."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flatparam
from flatparam.in_place.module import class_for
from flatparam_clients.second_door.faces import DTensorFaces
from flatparam_clients.second_door.held_parts import have_optimizers_step_parts
from flatparam_clients.second_door.presented import PresentedModule
from flatparam_comm import ProcessGroupCollectives
from flatparam_core import CHUNK, LayoutRule
from flatparam_runtime import unit_of

__all__ = ["fully_shard"]


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **named: Any) -> Any:
    """Shard a module in place as `flatparam.fully_shard` does, and have its parameters be `DTensor`s, as torch's are.

    Each is cut along dimension 0 in as many chunks as there are ranks, so that its local part has the rows that torch's
    `fully_shard` would give this rank.

    Args:
        module: the module, or a list of modules.
        mesh: see `flatparam.fully_shard`; by default one of all ranks.
        named: see `flatparam.fully_shard`.

    Returns:
        What was passed.

    Raises:
        ValueError, TypeError, FlatParamError: see `flatparam.fully_shard`.
    """
    modules = [module] if isinstance(module, nn.Module) else [*module]
    if mesh is None:
        mesh = _mesh_of_all(modules)
    # Both may come from a generator, and are looked at twice.
    ignored = [*(named.pop("ignored_params", None) or ())]
    _check_dimensions(modules, {*ignored})
    named.update(ignored_params=ignored or None, mesh=mesh, layout=_chunks, values_later=True)
    if "mp_policy" in named:
        named["mp_policy"] = _with_default_of_torch(named["mp_policy"], modules)
    flatparam.fully_shard(module if isinstance(module, nn.Module) else modules, **named)
    have_optimizers_step_parts()
    faces = DTensorFaces.over(mesh)
    for each in modules:
        unit = unit_of(each)
        assert unit is not None
        if isinstance(unit.topology.shard, ProcessGroupCollectives):
            # The order in which FSDP2's sums over gloo are made.
            unit.topology.shard.adds_in_rank_order = False
        for handle in unit.handles:
            handle.wear(faces)
        kind: Any = type(each)
        each.__class__ = class_for(kind._sharded_class, PresentedModule)
    return module


def _chunks(name: str, parameter: nn.Parameter) -> LayoutRule:
    return CHUNK


def _with_default_of_torch(policy: Any, modules: list[nn.Module]) -> Any:
    """Return the policy with the dtype of reductions that the torch whose class it is takes if none is named.

    From 2.15 on, whose policies have a function for single parameters, that is the parameters' own dtype.
    """
    if not hasattr(policy, "param_dtype_override_fn") or policy.param_dtype is None or policy.reduce_dtype:
        return policy
    own = (p.dtype for each in modules for p in each.parameters() if p.is_floating_point())
    return dataclasses.replace(policy, reduce_dtype=next(own, None))


def _mesh_of_all(modules: list[nn.Module]) -> DeviceMesh:
    here = next((parameter.device.type for each in modules for parameter in each.parameters()), "cpu")
    kind = here if here not in ("meta", "cpu") else "cpu"
    if here in ("meta", "cpu") and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # there is one
    return init_device_mesh(kind, (dist.get_world_size(),))


def _check_dimensions(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    for each in modules:
        for name, parameter in each.named_parameters():
            if not parameter.dim() and parameter not in ignored:
                raise ValueError(
                    f"fully_shard: {name!r} has no dimension to cut: give it shape (1,), or list it in ignored_params"
                )
