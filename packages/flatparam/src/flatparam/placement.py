"""Where a module's tensors live and whose values they have, before they are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatparam.resolve import Ignored
from flatparam_comm import Topology, broadcast_tensors
from flatparam_runtime import unit_of

__all__ = ["broadcast_from_first", "move", "own_tensors"]


def own_tensors(module: nn.Module, ignored: Ignored) -> Iterator[torch.Tensor]:
    """The parameters and buffers of `module` that are neither ignored nor those of a unit below it, each once."""
    seen: set[int] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        stack.extend(
            child
            for child in reversed(list(current.children()))
            if unit_of(child) is None and child not in ignored.modules
        )
        for tensor in (*current.parameters(recurse=False), *current.buffers(recurse=False)):
            if (
                id(tensor) not in seen
                and tensor not in ignored
                and not getattr(tensor, "_fsdp_flattened", False)
            ):
                seen.add(id(tensor))
                yield tensor


def move(module: nn.Module, device: torch.device | None, ignored: Ignored) -> None:
    """Put the unit's own parameters and buffers on `device`, in place; those on the meta device stay there."""
    if device is not None:
        for tensor in own_tensors(module, ignored):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor of a wrapper class (a quantised one, say) is made of; else itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def broadcast_from_first(topology: Topology, tensors: Sequence[torch.Tensor]) -> None:
    """Give every data-parallel rank the first rank's values: first across the copies of a shard, then inside."""
    detached = [part.detach() for tensor in tensors for part in _plain_parts(tensor)]
    for group in (topology.replicate, topology.shard):
        if group is not None and group.size > 1 and detached:
            broadcast_tensors(group, detached)
