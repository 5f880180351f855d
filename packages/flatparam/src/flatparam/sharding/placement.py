"""The devices and the values of a module's tensors, before they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatparam.resolving import Ignored
from flatparam_comm import Topology, broadcast_tensors
from flatparam_core import each_module, give_data
from flatparam_runtime import unit_of

__all__ = ["broadcast_from_first", "move", "own_modules", "own_tensors"]


def own_modules(module: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """`module` and those below it that are neither ignored nor part of a unit below it, each once."""
    below = each_module(module, lambda child: unit_of(child) is not None or child in ignored.modules)
    return [child for child in below if child not in ignored.modules]


def own_tensors(modules: Iterable[nn.Module], ignored: Ignored) -> Iterator[torch.Tensor]:
    """The parameters and buffers that `modules` register, each once, but for those that are ignored or sharded."""
    seen: set[int] = set()
    for child in modules:
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is None or id(tensor) in seen or tensor in ignored:
                continue
            seen.add(id(tensor))
            if not getattr(tensor, "_fsdp_flattened", False):
                yield tensor


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Put `tensors` on `device`, in place; those on the meta device stay there."""
    for tensor in tensors:
        if not tensor.is_meta:
            give_data(tensor, tensor.data.to(device))


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor of a wrapper class (a quantised one, say) is made of; else itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    # A DTensor's mesh is among them.
    inner = [getattr(tensor, name) for name in names]
    return [part for part in inner if isinstance(part, torch.Tensor)]


def broadcast_from_first(topology: Topology, tensors: Sequence[torch.Tensor]) -> None:
    """Give every data-parallel rank the first rank's values: first across the copies of a shard, then inside."""
    detached = [part.detach() for tensor in tensors for part in _plain_parts(tensor)]
    for group in reversed(topology.groups if detached else ()):
        broadcast_tensors(group, detached)
