"""The functions of `torch.distributed.checkpoint`, for models that are sharded with flatparam.

`save` and `load` are torch's own. `async_save` is too, with a stager that knows `ShardedTensor`s and a process group of
its own. The functions of torch's `torch.distributed.checkpoint.state_dict` are in `flatparam.checkpoint.state_dict`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from flatparam.compat import torchs_own
from flatparam_state.forms.tiling import is_sharded_tensor

__all__ = ["async_save", "load", "save"]

_GROUPS: weakref.WeakKeyDictionary[Any, weakref.ReferenceType[Any]] = weakref.WeakKeyDictionary()
"""By the default group, that in which its ranks save in the background; torch keeps both until they are destroyed."""


def async_save(state_dict: Any, **arguments: Any) -> Any:
    """Call `torch.distributed.checkpoint.async_save`, for sharded tensors too, and return torch's future.

    A state without sharded tensors is saved as torch does it. After `install()` this is torch's function.

    Args:
        arguments: those of torch's function. The default `async_stager` copies to CPU memory before the call returns.
            The default `process_group` is a gloo group that nothing else uses, because torch's background thread
            issues collectives, which must not be in the group in which training issues its own.
    """
    state = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()}
    if _is_sharded(state):
        if not isinstance(arguments.get("storage_writer"), AsyncStager):
            arguments["async_stager"] = arguments.get("async_stager") or BlockingAsyncStager()
        if dist.is_initialized() and not (arguments.get("process_group") or arguments.get("no_dist")):
            arguments["process_group"] = _own_group()
    return torchs_own("torch.distributed.checkpoint.state_dict_saver", "async_save")(state, **arguments)


def _is_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_sharded, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_sharded, value))
    return is_sharded_tensor(value) or isinstance(value, DTensor)


def _own_group() -> Any:
    default = dist.group.WORLD
    if default not in _GROUPS:
        _GROUPS[default] = weakref.ref(dist.new_group(backend="gloo"))
    return _GROUPS[default]()
