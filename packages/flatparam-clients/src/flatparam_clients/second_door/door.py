"""FSDP2's names in torch's modules, and what they stand for after `flatparam.install()`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable
from typing import Any, Final

from torch import nn

import flatparam
from flatparam_clients.names import FSDP, STATE_FUNCTIONS
from flatparam_clients.second_door.presented import routed
from flatparam_clients.second_door.sharding import fully_shard

__all__ = ["fsdp2_names", "share_comm_ctx", "sharded_by_torch"]

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
        found.update(
            {(module, name): value for name, value in ours.items() if name in vars(sys.modules[module])}
        )
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
