"""Where a module's tensors live and whose values they have, before they are sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flatparam.errors import NotYetSupportedError
from flatparam.resolve import Ignored
from flatparam_comm import Collectives, broadcast_tensors
from flatparam_runtime import unit_of

__all__ = ["move", "resolve_device", "synchronise"]


def resolve_device(device_id: Any, module: nn.Module, ignored: Ignored) -> torch.device | None:
    """The device that the unit's parameters are to live on; `None` leaves them where they are.

    Raises:
        ValueError: where `device_id` is no device, or the module is on the meta device.
    """
    for tensor in own_tensors(module, ignored):
        if tensor.is_meta:
            raise NotYetSupportedError(
                f"a {type(module).__name__} on the meta device",
                "give its tensors a real device and values first",
            )
    if device_id is None:
        return None
    if not isinstance(device_id, (int, str, torch.device)):
        raise ValueError(f"device_id: expected an int, a string or a torch.device, found {device_id!r}")
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # the CPU has no index that means anything
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        warnings.warn(
            f"device_id={device_id!r} has no index: using the current device, {device}", stacklevel=3
        )
    return device


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
