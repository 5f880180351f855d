"""Points in the streams of an accelerator; the CPU has none, as its work is done when a call returns."""

from __future__ import annotations

import torch
from torch import Tensor


def mark(tensor: Tensor) -> torch.Event | None:
    """Return this point of the current stream of an accelerator's tensor; None for the CPU."""
    if tensor.device.type == "cpu":
        return None
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return event


def follow(point: torch.Event | None, tensor: Tensor) -> None:
    """Order the current stream of the tensor's device after the point."""
    if point is not None:
        torch.accelerator.current_stream(tensor.device).wait_event(point)


def keep(tensor: Tensor) -> None:
    """Make the allocator keep memory that belongs to a different stream until the current stream has used it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
