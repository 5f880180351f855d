"""What orders memory and time on a device: its streams, or nothing on the CPU."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import final

import attrs
import torch

from flatparam_comm.transfer.accelerator import Streams
from flatparam_comm.transfer.device import Copies, CopiesBeside, OnDevice

__all__ = ["NoStreams", "streams_of"]


@final
@attrs.frozen
class NoStreams:
    """The CPU: everything has happened when the call returns."""

    runs_ahead: bool = False
    is_capturing: bool = False

    def current(self) -> int:
        """There is one."""
        return 0

    def uploading(self) -> AbstractContextManager[Copies]:
        """Nothing happens beside anything."""
        return nullcontext(CopiesBeside())

    def downloading(self) -> AbstractContextManager[Copies]:
        """Nothing happens beside anything."""
        return nullcontext(CopiesBeside())

    def aside(self) -> AbstractContextManager[Copies]:
        """Nothing happens beside anything."""
        return nullcontext(CopiesBeside())

    def wait_for_uploads(self) -> None:
        """They are over."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """It is there."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return tensor


_ON_CPU = NoStreams()


def streams_of(device: torch.device) -> OnDevice:
    """The streams beside the current one of a device: the same object each time, since what they do is ordered there.

    Each stream that somebody computes on has its own beside it, as memory that is used there is given out again there.
    """
    if device.type in ("cpu", "meta"):
        return _ON_CPU
    return _beside(device, torch.accelerator.current_stream(device).stream_id)


@functools.cache
def _beside(device: torch.device, stream: int) -> Streams:
    return Streams(device)
