"""A module that was sharded on the meta device, and is then given memory and values, as FSDP2's programs do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from flatparam.resolving import Ignored
from flatparam.sharding.placement import own_modules
from flatparam_core import FlatParamError
from flatparam_runtime import Unit, summon_full_params, unit_of, units_in
from flatparam_state.values_later import ValuesLater

__all__ = ["initialisers_of", "make_on_device", "values_to_come"]

#: The methods by which modules give themselves values: torch's convention, and that of many models.
_METHODS: Final = ("reset_parameters", "init_weights")


def initialisers_of(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that give its modules values, each to be called with full parameters in place."""
    found = {name: getattr(original, name, None) for name in _METHODS}
    return {name: _with_full_parameters(method) for name, method in found.items() if callable(method)}


def _with_full_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def initialise(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(module)
        if unit is None or unit.showing.wishes is not None:
            return method(module, *args, **kwargs)
        # Sharded modules inside, whose methods this one calls, show theirs, one after the other.
        with summon_full_params(module, recurse=False):
            return method(module, *args, **kwargs)

    return initialise


def values_to_come(module: nn.Module, ignored: Ignored, *, parameters: bool) -> ValuesLater | None:
    """Return the tensors on the meta device to which nothing in their module gives values.

    Buffers are made by `make_on_device`.

    Args:
        parameters: whether parameters are among them.
    """
    found = [
        tensor
        for child in own_modules(module, ignored)
        if not callable(getattr(child, "reset_parameters", None))
        for tensor in (
            *child.buffers(recurse=False),
            *(child.parameters(recurse=False) if parameters else ()),
        )
        if tensor.is_meta
    ]
    return ValuesLater.of(found) if found else None


def make_on_device(module: nn.Module, device: Any) -> None:
    """Give buffers that are on the meta device memory; parameters have theirs since the module was sharded.

    Raises:
        FlatParamError: for a different device than that of the units; nothing is changed.
    """
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    for unit in units_in(module):
        if not any(_is_of(asked, known) for known in _devices_of(unit)):
            raise FlatParamError(
                f"to_empty(): unit {unit.name!r} is on {unit.device}, found device={str(device)!r}; its parameters "
                "have memory there since fully_shard, so pass that device, or leave out to_empty()"
            )
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device=asked)


def _devices_of(unit: Unit) -> Iterable[torch.device]:
    """Return the device on which a unit computes, and those of its shards."""
    return {unit.device, *(handle.flat_param.device for handle in unit.handles)}


def _is_of(asked: torch.device, known: torch.device) -> bool:
    """Return whether a device is the one that was asked for, which need not say which of its kind it is."""
    return asked == known or str(asked) == known.type
