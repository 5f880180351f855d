"""The choice of the device that full parameters live on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatparam.resolving.ignored import Ignored
from flatparam_core import each_module
from flatparam_runtime import warn_caller

__all__ = ["resolve_device"]


def resolve_device(
    device_id: Any, module: nn.Module, ignored: Ignored, *, offload: bool
) -> torch.device | None:
    """Return the device that full parameters are to live on; `None` leaves them where they are.

    Without `device_id`, parameters on the CPU and on one accelerator go to the accelerator; those on the meta device,
    and those whose shards are to be kept in CPU memory, to the current accelerator if there is one.

    Raises:
        TypeError: if `device_id` is nothing that names a device.
        ValueError: if parameters are on different accelerators.
    """
    asked = None if device_id is None else _device(device_id)
    found = {
        parameter.device
        for child in each_module(module)
        for parameter in child._parameters.values()
        if parameter is not None
        and parameter not in ignored
        and not getattr(parameter, "_fsdp_flattened", False)
    }
    accelerators = sorted({device for device in found if device.type not in ("cpu", "meta")}, key=str)
    others = [device for device in accelerators if asked is None or device != asked]
    if others and (asked is not None or len(others) > 1):
        wanted = "one device" if asked is None else f"device_id={asked}"
        raise ValueError(
            f"device_id: expected parameters on {wanted} or on the CPU, found some on {', '.join(map(str, others))}; "
            "move the module to one device, or pass that device"
        )
    if asked is not None:
        return asked
    if accelerators and len(found) > 1:
        return accelerators[0]
    if offload or torch.device("meta") in found:
        here = next((device for device in found if device.type != "meta"), torch.device("cpu"))
        if here.type == "cpu" and torch.accelerator.is_available():
            here = _device(torch.accelerator.current_device_index())
        return here
    return None


def _device(device_id: Any) -> torch.device:
    if not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(f"device_id: expected an int, a string or a torch.device, found {device_id!r}")
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type == "cpu":
        # The index of a CPU means nothing.
        return torch.device("cpu")
    if device.type != "meta" and not torch.get_device_module(device).is_available():
        raise ValueError(
            f"device_id: expected a device of this machine, found {device}, which torch cannot use here"
        )
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        warn_caller(f"device_id={device_id!r} has no index: using the current device, {device}")
    return device
