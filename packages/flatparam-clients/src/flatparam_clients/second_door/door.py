"""FSDP2's names in torch's modules, and what they stand for after `flatparam.install()`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import flatparam
from flatparam.in_place.module import class_for
from flatparam_clients.names import FSDP, STATE_FUNCTIONS
from flatparam_clients.second_door.faces import (
    DTensorFaces,
    ShardedParameter,
    both_meshes,
    have_dtensors_without_address,
)
from flatparam_clients.second_door.held_parts import have_optimizers_step_parts
from flatparam_clients.second_door.presented import PresentedModule, routed, state_of
from flatparam_comm import ProcessGroupCollectives
from flatparam_core import CHUNK, LayoutRule
from flatparam_meshes import KEEPS_ROWS
from flatparam_runtime import unit_of

_CALLS: Final = itertools.count(1)


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **named: Any) -> Any:
    """Shard a module in place as `flatparam.fully_shard` does, and have its parameters be `DTensor`s, as torch's are.

    Each is cut along dimension 0 in as many chunks as there are ranks, so that its local part has the rows that torch's
    `fully_shard` would give this rank. One that is a `DTensor` of tensor parallelism is shown as one over both meshes.

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
    _check_and_mark(modules, {*ignored}, mesh)
    named.update(ignored_params=ignored or None, mesh=mesh, layout=_chunks, values_later=True)
    if "mp_policy" in named:
        named["mp_policy"] = _with_default_of_torch(named["mp_policy"], modules)
    with _numbers_of_its_own(modules):
        flatparam.fully_shard(module if isinstance(module, nn.Module) else modules, **named)
    have_optimizers_step_parts()
    have_dtensors_without_address()
    for sharded in modules:
        unit = unit_of(sharded)
        assert unit is not None
        if isinstance(unit.topology.shard, ProcessGroupCollectives):
            # The order in which FSDP2's sums over gloo are made.
            unit.topology.shard.adds_in_rank_order = False
        for handle in unit.handles:
            meshes, names = handle.forms.meshes, handle.layout.fqns
            forms = {name: None if meshes is None else meshes.form(handle, at) for at, name in enumerate(names)}
            handle.wear(DTensorFaces.over(mesh, {name: form for name, form in forms.items() if form is not None}))
        kind: Any = type(sharded)
        sharded.__class__ = class_for(kind._sharded_class, PresentedModule)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # torch's function has it


@contextlib.contextmanager
def _numbers_of_its_own(modules: list[nn.Module]) -> Iterator[None]:
    """Have a call draw numbers of its own for modules on the meta device; torch's leaves them there, and draws none."""
    if not any(parameter.is_meta for each in modules for parameter in each.parameters()):
        yield
        return
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if here is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type="cuda" if here is None else here.type):
        seed = torch.initial_seed() + next(_CALLS)
        for kind in (torch.default_generator, *([] if here is None else [torch.get_device_module(here)])):
            kind.manual_seed(seed)
        yield


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


def _check_and_mark(modules: list[nn.Module], ignored: set[nn.Parameter], mesh: DeviceMesh) -> None:
    """Check that each parameter has a dimension to cut, and have the shards of `DTensor`s be rows."""
    for each in modules:
        for name, parameter in each.named_parameters():
            if not parameter.dim() and parameter not in ignored:
                raise ValueError(
                    f"fully_shard: {name!r} has no dimension to cut: give it shape (1,), or list it in ignored_params"
                )
            is_face = isinstance(parameter, ShardedParameter)
            if isinstance(parameter, DTensor) and not is_face and parameter not in ignored:
                try:
                    both_meshes(mesh, parameter.device_mesh)
                except ValueError as error:
                    raise ValueError(f"fully_shard: {name!r}: {error}") from error
                setattr(parameter, KEEPS_ROWS, True)


_HOMES: Final = (
    FSDP,
    f"{FSDP}._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Torch's modules from which programs take the names."""


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Accept FSDP2's call: it has no effect, because all modules on a device share their streams.

    Raises:
        ValueError: if one of `modules` is not sharded.
    """
    for module in modules:
        if not isinstance(module, flatparam.FSDPModule):
            raise ValueError(f"share_comm_ctx: expected sharded modules, found a {type(module).__name__}")


def fsdp2_names() -> dict[tuple[str, str], Any]:
    """By module of torch's and name, the object of ours that a program finds there; the policies stay torch's."""
    ours = {
        "fully_shard": fully_shard,
        "FSDPModule": flatparam.FSDPModule,
        "UnshardHandle": flatparam.UnshardHandle,
        "register_fsdp_forward_method": flatparam.register_fsdp_forward_method,
        "share_comm_ctx": share_comm_ctx,
    }
    found = {}
    for module in _HOMES:
        # The package has a function of the name of its module.
        importlib.import_module(module)
        found.update({(module, name): value for name, value in ours.items() if name in vars(sys.modules[module])})
    functions: Any = importlib.import_module("flatparam.checkpoint.state_dict")
    for name in functions.__all__:
        if name.startswith(("get_", "set_")):
            found[STATE_FUNCTIONS, name] = routed(name, getattr(functions, name))
    return found


def sharded_by_torch() -> list[Any]:
    """Return the modules in memory that torch's FSDP2 has sharded."""
    home: Any = sys.modules.get(f"{FSDP}._fully_shard._fully_shard")
    if home is None:
        return []
    kinds = home.FSDPModule.__subclasses__()
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds] if kinds else []
