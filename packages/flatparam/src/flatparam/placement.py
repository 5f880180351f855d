"""Where a module's tensors live and whose values they have, before they are sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from flatparam.errors import NotYetSupportedError
from flatparam.resolve import Ignored
from flatparam_comm import Collectives, broadcast_tensors
from flatparam_runtime import unit_of

__all__ = ["move", "refuse_meta", "synchronise"]


def refuse_meta(module: nn.Module, ignored: Ignored) -> None:
    """Check that everything in `module` that is not ignored has values.

    Raises:
        NotYetSupportedError: naming what is on the meta device.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and tensor not in ignored:
            raise NotYetSupportedError(
                f"a module with {name!r} on the meta device", "give it a real device and values first"
            )


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
            if id(tensor) not in seen and tensor not in ignored:
                seen.add(id(tensor))
                yield tensor


def move(module: nn.Module, device: torch.device | None, ignored: Ignored) -> None:
    """Put the unit's own parameters and buffers on `device`, in place."""
    if device is not None:
        for tensor in own_tensors(module, ignored):
            tensor.data = tensor.data.to(device)


def synchronise(module: nn.Module, group: Collectives, ignored: Ignored) -> None:
    """Give every rank rank 0's values of the unit's own parameters and buffers."""
    broadcast_tensors(group, [tensor.detach() for tensor in own_tensors(module, ignored)])
