"""The functions of `torch.distributed.checkpoint`, for models that are sharded with flatparam.

`save` and `load` are torch's own. `async_save` is too, with a stager that knows `ShardedTensor`s and a process group of
its own. The functions of torch's `torch.distributed.checkpoint.state_dict` are in `flatparam.checkpoint.state_dict`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["async_save", "load", "save"]

_GROUPS: weakref.WeakKeyDictionary[Any, weakref.ReferenceType[Any]] = weakref.WeakKeyDictionary()
"""By the default group, that in which its ranks save in the background; torch keeps both until they are destroyed."""


def async_save(state_dict: Any, **arguments: Any) -> Any:
    """`torch.distributed.checkpoint.async_save`, also of sharded tensors; returns the future that torch returns.

    Args:
        arguments: torch's own. Unless given, `async_stager` is one that copies to CPU memory before the call returns,
            and `process_group` one of gloo that nothing else uses: torch's background thread communicates, and must
            not do so in a group in which training does at the same time.
    """
    arguments.setdefault("async_stager", BlockingAsyncStager())
    if dist.is_initialized() and arguments.get("process_group") is None:
        default = dist.group.WORLD
        if default not in _GROUPS:
            _GROUPS[default] = weakref.ref(dist.new_group(backend="gloo"))
        arguments["process_group"] = _GROUPS[default]()
    return state_dict_saver.async_save(state_dict, **arguments)
