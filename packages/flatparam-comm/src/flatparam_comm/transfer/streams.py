"""The order of memory and time on a device: by its streams, or by nothing on the CPU."""

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
    """The CPU, whose work is done when a call returns."""

    runs_ahead: bool = False
    is_capturing: bool = False

    def current(self) -> int:
        """Always 0: there is one stream."""
        return 0

    def uploading(self) -> AbstractContextManager[Copies]:
        """Copy in order with all other work."""
        return nullcontext(CopiesBeside())

    def downloading(self) -> AbstractContextManager[Copies]:
        """Copy in order with all other work."""
        return nullcontext(CopiesBeside())

    def aside(self) -> AbstractContextManager[Copies]:
        """Copy in order with all other work."""
        return nullcontext(CopiesBeside())

    def wait_for_uploads(self) -> None:
        """Do nothing."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


_ON_CPU = NoStreams()


def streams_of(device: torch.device) -> OnDevice:
    """The streams beside the current stream of a device; the same object each time, since it orders their work.

    Each compute stream has its own streams beside it, as memory that is used on a stream is reused on that stream.
    """
    if device.type in ("cpu", "meta"):
        return _ON_CPU
    return _beside(device, torch.accelerator.current_stream(device).stream_id)


@functools.cache
def _beside(device: torch.device, stream: int) -> Streams:
    return Streams(device)
