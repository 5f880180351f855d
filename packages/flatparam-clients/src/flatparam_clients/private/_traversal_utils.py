"""FSDP1's module that finds wrappers in a model: its names."""

from __future__ import annotations

from torch import nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam_clients.handle_view import HandleView, handle_views

__all__ = ["_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"]


def _get_fsdp_states(module: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the wrappers in `module`, itself included, depth first, each once."""
    return FullyShardedDataParallel.fsdp_modules(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[FullyShardedDataParallel], list[nn.Module]]:
    """Return the wrappers in `module`, twice: a wrapper is the state of itself."""
    found = _get_fsdp_states(module)
    return found, list(found)


def _get_fsdp_handles(module: nn.Module) -> list[HandleView]:
    """Return the handles of the flat parameters in `module`."""
    return handle_views(wrapper._unit for wrapper in _get_fsdp_states(module))
