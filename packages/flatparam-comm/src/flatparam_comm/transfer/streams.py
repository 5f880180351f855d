"""The order of memory and time on a device: by its streams, or by nothing on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import final

import attrs
import torch

from flatparam_comm.transfer.accelerator import Streams
from flatparam_comm.transfer.device import Copies, OnDevice


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
        return nullcontext(Copies())

    def downloading(self) -> AbstractContextManager[Copies]:
        """Copy in order with all other work."""
        return nullcontext(Copies())

    def aside(self) -> AbstractContextManager[Copies]:
        """Copy in order with all other work."""
        return nullcontext(Copies())

    def wait_for_uploads(self) -> None:
        """Do nothing."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


_ON_CPU = NoStreams()
_acting_as: ContextVar[OnDevice] = ContextVar("acting_as", default=_ON_CPU)


@contextmanager
def acting_as(form: OnDevice) -> Iterator[None]:
    """Inside, the CPU orders memory and time as `form` does: `NoStreams(runs_ahead=True)` does as an accelerator.

    Nothing runs ahead in fact, so results are what they always are. For plans, and for tests of schedules.
    """
    token = _acting_as.set(form)
    try:
        yield
    finally:
        _acting_as.reset(token)


def streams_of(device: torch.device) -> OnDevice:
    """Return the streams beside the current stream of a device; the same object each time, since it orders their work.

    Each compute stream has its own streams beside it, as memory that is used on a stream is reused on that stream.
    """
    if device.type in ("cpu", "meta"):
        return _acting_as.get()
    return _beside(device, torch.accelerator.current_stream(device).stream_id)


@functools.cache
def _beside(device: torch.device, stream: int) -> Streams:
    return Streams(device)
