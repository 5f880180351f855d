"""What `torch.distributed.checkpoint` has, for models that are sharded with flatparam.

`save` and `load` are torch's own. `async_save` is too, with a stager that knows `ShardedTensor`s, which the default one
of torch does not. The functions of torch's `torch.distributed.checkpoint.state_dict` are in
`flatparam.checkpoint.state_dict`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["async_save", "load", "save"]


def async_save(state_dict: Any, **arguments: Any) -> Any:
    """`torch.distributed.checkpoint.async_save`, also of sharded tensors; returns the future that torch returns.

    Args:
        arguments: torch's own; `async_stager` is one that copies to CPU memory before the call returns, unless given.
    """
    arguments.setdefault("async_stager", BlockingAsyncStager())
    return state_dict_saver.async_save(state_dict, **arguments)
