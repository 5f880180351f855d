"""The order of memory and time on a device: by its streams, or by nothing on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, final

import attrs
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


class Mark(Protocol):
    """A point in a stream, after all work that was queued there before."""

    def wait(self) -> None:
        """Order the current stream after this point; the host does not wait."""

    def synchronize(self) -> None:
        """Block the host until the device has reached this point."""

    def is_reached(self) -> bool:
        """Return whether the device has reached this point; the host does not wait."""


@final
@attrs.define(eq=False)
class Copies:
    """Copies that are queued on a stream of their own, or made at once."""

    end: Mark | None = None
    """The point at which they end, once all are queued; `None` if they are made at once."""


class OnDevice(Protocol):
    """The order of memory and time on one device."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the host queues work that the device does later."""

    @property
    def is_capturing(self) -> bool:
        """Whether queued work is recorded in a graph, to be replayed: the host may not ask the device anything then."""

    def current(self) -> int:
        """Return the number of the current stream."""

    def uploading(self) -> AbstractContextManager[Copies]:
        """Inside, copies from the host's memory are queued on their stream, after all work that is queued now.

        All other work inside is queued there, too. The host may free a tensor that was allocated inside as soon as the
        stream that uses it has been ordered after the copies, and the next tensor inside reuses its memory.
        """

    def downloading(self) -> AbstractContextManager[Copies]:
        """Inside, copies to the host's memory are queued on their stream, after all work that is queued now.

        The memory that they read must stay until the host, or the stream that it was allocated on, has waited for their
        end.
        """

    def aside(self) -> AbstractContextManager[Copies]:
        """Inside, work is queued on the stream for copies to the host, which waits for nothing that is queued now.

        The work may use only the host's tensors, and those that are made inside.
        """

    def wait_for_uploads(self) -> None:
        """Block the host until the device has made all uploads, and so reads the host's memory no more."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of a small host tensor on `device`; the host does not wait for the copy."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a small tensor on the host, which is complete once the host has waited for the device."""


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

    downloading = aside = uploading

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
    """The streams for copies beside one compute stream of an accelerator, made on first use."""

    device: torch.device
    runs_ahead: bool = True
    _up: torch.Stream | None = None
    _down: torch.Stream | None = None
    _uploaded: Mark | None = None

    @property
    def is_capturing(self) -> bool:
        """Ask whether the current stream is recorded in a graph; False on devices that have no graphs."""
        ask = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def current(self) -> int:
        """Return the number that torch gives the current stream of the device."""
        return int(torch.accelerator.current_stream(self.device).stream_id)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a small host tensor through pinned memory, without waiting."""
        return tensor.pin_memory().to(device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small tensor to pinned memory, without waiting."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[Copies]:
        """Queue copies to the device on their stream, after all work that is queued now."""
        if self._up is None:
            self._up = _stream_for_copies(self.device)
        with self._on(self._up) as copies:
            yield copies
        self._uploaded = copies.end

    @contextlib.contextmanager
    def downloading(self) -> Iterator[Copies]:
        """Queue copies to the host on their stream, after all work that is queued now."""
        with self._on(self._for_downloads()) as copies:
            yield copies

    @contextlib.contextmanager
    def aside(self) -> Iterator[Copies]:
        """Queue work on the stream for copies to the host, which waits for nothing that is queued now."""
        with self._on(self._for_downloads(), after_current=False) as copies:
            yield copies

    def _for_downloads(self) -> torch.Stream:
        if self._down is None:
            self._down = _stream_for_copies(self.device)
        return self._down

    def wait_for_uploads(self) -> None:
        """Block the host until the last upload has read its memory."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
            self._uploaded = None

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream, *, after_current: bool = True) -> Iterator[Copies]:
        copies = Copies()
        before, index = (torch.accelerator.current_stream(self.device), torch.accelerator.current_device_index())
        if after_current:
            stream.wait_event(self._record(before))
        # Not `with stream`: a stream remembers only one stream to return to, and another thread may use it, too.
        torch.accelerator.set_stream(stream)
        try:
            yield copies
        finally:
            copies.end = self._mark(stream)
            torch.accelerator.set_stream(before)
            # Making a stream current makes its device current, too.
            if index != self.device.index:
                torch.accelerator.set_device_index(index)

    def _mark(self, stream: torch.Stream) -> Mark:
        return _Event(self.device, self._record(stream))

    def _record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device)
        event.record(stream)
        return event


def _stream_for_copies(device: torch.device) -> torch.Stream:
    """Return a new stream that the device serves before its other streams, if it has priorities.

    What is queued here is short, and a collective waits for it. With equal priorities it comes after all of a long
    product that has begun, and so does the collective.
    """
    try:
        return torch.Stream(device, priority=-1)
    except (RuntimeError, TypeError, ValueError):
        return torch.Stream(device)
