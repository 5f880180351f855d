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
    """Call `torch.distributed.checkpoint.async_save`, for sharded tensors too, and return torch's future.

    Args:
        arguments: those of torch's function. The default `async_stager` copies to CPU memory before the call returns.
            The default `process_group` is a gloo group that nothing else uses, because torch's background thread
            issues collectives, which must not be in the group in which training issues its own.
    """
    arguments.setdefault("async_stager", BlockingAsyncStager())
    if dist.is_initialized() and arguments.get("process_group") is None:
        default = dist.group.WORLD
        if default not in _GROUPS:
            _GROUPS[default] = weakref.ref(dist.new_group(backend="gloo"))
        arguments["process_group"] = _GROUPS[default]()
    return state_dict_saver.async_save(state_dict, **arguments)
