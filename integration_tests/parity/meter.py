"""What is in memory on one rank, looked at after every operation of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatparam_runtime import units_in


class Meter(TorchDispatchMode):
    """Inside the context, after every operation of this thread (those of backward passes too), how much memory is held.

    A world of threads runs backward in the rank's own thread, so the meter of a rank sees that rank, and only that.

    Attributes:
        flat_nbytes: the most bytes of full parameters and unsharded gradients, by the storages of the handles' buffers.
        live_nbytes: the most bytes of all tensors that were made inside the context, and of these buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        handles = [handle for unit in units_in(model) for handle in unit.handles]
        self.buffers = [tensor for h in handles for tensor in (h.buffer.tensor, h.gradients.buffer.tensor)]
        self.seen: dict[int, StorageWeakRef] = {}
        self.reset()
        for buffer in self.buffers:
            self._note(buffer)

    def reset(self) -> None:
        """Begin anew with the peaks."""
        self.flat_nbytes = self.live_nbytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **kwargs)
        for leaf in tree_leaves(result):
            # What an operation was given is either noted already or older than the context, such as the shards.
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf)
        self.flat_nbytes = max(self.flat_nbytes, held(self.buffers))
        self.live_nbytes = max(self.live_nbytes, self.live_now())
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:  # a weak reference keeps the address from being used again
            self.seen[storage._cdata] = StorageWeakRef(storage)

    def live_now(self) -> int:
        """The bytes of all tensors that were made inside the context and still live, and of the handles' buffers."""
        total = 0
        for address, reference in list(self.seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.seen[address]
            else:
                total += storage.nbytes()
        return total


def held(tensors: list[Tensor]) -> int:
    """The bytes of the storages under these tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
