"""What orders memory and time on one device: streams and events on an accelerator, nothing on the CPU.

On an accelerator the host runs ahead of the device. Work that is queued on one stream happens in order; two streams are
ordered by events alone. Units compute on whatever stream is current. A collective has a stream of its own, which its
backend orders after the current one when the call is made. What is here are the two other streams: one for copies from
the host's memory and one for copies to it, so that both run beside the computing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import attrs
import torch
from typing_extensions import final

__all__ = ["Mark", "NoStreams", "Streams", "streams_of"]


class Mark(Protocol):
    """A point in a stream: all that was queued there before."""

    def wait(self) -> None:
        """Have the current stream go on only after it; the host does not wait."""

    def synchronize(self) -> None:
        """Have the host wait until the device has done it."""

    def is_reached(self) -> bool:
        """Whether the device has done it; the host does not wait."""


class Copies(Protocol):
    """Copies on a stream of their own."""

    @property
    def end(self) -> Mark:
        """The point that they end at, once they are queued."""


class OnDevice(Protocol):
    """What orders memory and time on one device."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the host queues work that the device does later."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is queued now is recorded in a graph, to be repeated: the host may not look at anything then."""

    def current(self) -> int:
        """A number of the current stream."""

    def uploading(self) -> AbstractContextManager[Copies]:
        """Inside, copies from the host's memory are queued on their stream, after all that is queued now.

        So is whatever else is queued inside. A tensor that is allocated inside may be freed, from the host's view, as
        soon as the stream that uses it has been ordered after the copies, and the next one inside reuses its memory.
        """

    def downloading(self) -> AbstractContextManager[Copies]:
        """Inside, copies to the host's memory are queued on their stream, after all that is queued now.

        What they read has to stay until the host has waited for their end, or the stream that it was allocated on.
        """

    def aside(self) -> AbstractContextManager[Copies]:
        """Inside, work is queued on the stream for copies to the host, which waits for nothing that is queued now.

        It may use only what the host has, and what is made inside.
        """

    def wait_for_uploads(self) -> None:
        """Have the host wait until the device has read all that it was to read from the host's memory."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of a small tensor of the host, for which the host does not wait."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What will be a copy of a small tensor on the host, once it has waited for it."""


@final
@attrs.frozen
class _Done:
    """A point that has been reached."""

    def wait(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def is_reached(self) -> bool:
        """Yes."""
        return True


@final
@attrs.define(eq=False)
class _Copies:
    end: Mark = attrs.field(factory=_Done)


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
        return nullcontext(_Copies())

    def downloading(self) -> AbstractContextManager[Copies]:
        """Nothing happens beside anything."""
        return nullcontext(_Copies())

    def aside(self) -> AbstractContextManager[Copies]:
        """Nothing happens beside anything."""
        return nullcontext(_Copies())

    def wait_for_uploads(self) -> None:
        """They are over."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """It is there."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return tensor


@final
@attrs.frozen(eq=False)
class _Event:
    device: torch.device
    event: torch.Event

    def wait(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        return bool(self.event.query())


@final
@attrs.define(eq=False)
class Streams:
    """An accelerator's streams for copies beside one that computes, made when they are first used."""

    device: torch.device
    runs_ahead: bool = True
    _up: torch.Stream | None = None
    _down: torch.Stream | None = None
    _uploaded: Mark = attrs.field(factory=_Done)

    @property
    def is_capturing(self) -> bool:
        """See `OnDevice.is_capturing`; false on devices that have no graphs."""
        ask = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def current(self) -> int:
        """The number that torch gives the current stream of the device."""
        return int(torch.accelerator.current_stream(self.device).stream_id)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See `OnDevice.to_device`."""
        return tensor.pin_memory().to(device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `OnDevice.to_host`."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[Copies]:
        """See `OnDevice.uploading`."""
        if self._up is None:
            self._up = torch.Stream(self.device)
        with self._on(self._up) as copies:
            yield copies
        self._uploaded = copies.end

    @contextlib.contextmanager
    def downloading(self) -> Iterator[Copies]:
        """See `OnDevice.downloading`."""
        with self._on(self._for_downloads()) as copies:
            yield copies

    @contextlib.contextmanager
    def aside(self) -> Iterator[Copies]:
        """See `OnDevice.aside`."""
        with self._on(self._for_downloads(), after_current=False) as copies:
            yield copies

    def _for_downloads(self) -> torch.Stream:
        if self._down is None:
            self._down = torch.Stream(self.device)
        return self._down

    def wait_for_uploads(self) -> None:
        """See `OnDevice.wait_for_uploads`."""
        self._uploaded.synchronize()
        self._uploaded = _Done()

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream, *, after_current: bool = True) -> Iterator[_Copies]:
        copies = _Copies()
        before, index = (
            torch.accelerator.current_stream(self.device),
            torch.accelerator.current_device_index(),
        )
        if after_current:
            stream.wait_event(self._record(before))
        # Not by `with stream`: a stream remembers one stream to go back to, and another thread may be on it, too.
        torch.accelerator.set_stream(stream)
        try:
            yield copies
        finally:
            copies.end = self._mark(stream)
            torch.accelerator.set_stream(before)
            if index != self.device.index:
                torch.accelerator.set_device_index(
                    index
                )  # a stream that becomes current brings its device with it

    def _mark(self, stream: torch.Stream) -> Mark:
        return _Event(self.device, self._record(stream))

    def _record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device)
        event.record(stream)
        return event


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
