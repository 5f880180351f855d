"""FSDP1's module of things that its others share: its names."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam_clients.handle_view import HandleTrainingState, HandleView, TrainingState, handle_views
from flatparam_core import FSDP_WRAPPED_MODULE
from flatparam_core import clean_fqn as clean_tensor_name

__all__ = [
    "FSDP_FLATTENED",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "HandleTrainingState",
    "TrainingState",
    "_get_module_fsdp_state",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "_has_fsdp_params",
    "_is_fsdp_flattened",
    "_module_handle",
    "_set_fsdp_flattened",
    "clean_tensor_name",
]

FSDP_PREFIX: Final = f"{FSDP_WRAPPED_MODULE}."
FSDP_FLATTENED: Final = "_fsdp_flattened"


def _get_module_fsdp_state(module: nn.Module) -> FullyShardedDataParallel | None:
    """Return the module, if it is a wrapper."""
    return module if isinstance(module, FullyShardedDataParallel) else None


_get_module_fsdp_state_if_fully_sharded_module = _get_module_fsdp_state


def _has_fsdp_params(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    """Return whether a wrapper holds any parameters itself."""
    return bool(state._unit.handles)


def _module_handle(state: FullyShardedDataParallel, module: nn.Module) -> HandleView | None:
    """Return the handle of a wrapper, if it holds any parameters itself."""
    return next(iter(handle_views([state._unit])), None)


def _set_fsdp_flattened(tensor: torch.Tensor) -> None:
    """Mark a tensor as one that a flat parameter holds."""
    setattr(tensor, FSDP_FLATTENED, True)


def _is_fsdp_flattened(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is marked as one that a flat parameter holds."""
    return getattr(tensor, FSDP_FLATTENED, False)
