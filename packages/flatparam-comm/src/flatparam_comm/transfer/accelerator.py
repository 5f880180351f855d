"""An accelerator's streams for copies that run beside its computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import attrs
import torch

from flatparam_comm.transfer.device import Copies, Mark


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
        before, index = (
            torch.accelerator.current_stream(self.device),
            torch.accelerator.current_device_index(),
        )
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
