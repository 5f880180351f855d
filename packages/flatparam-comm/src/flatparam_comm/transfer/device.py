"""The order of memory and time on one device: streams and events on an accelerator, nothing on the CPU.

On an accelerator the host runs ahead of the device. Work that is queued on one stream runs in order; only events order
two streams. Units compute on the current stream. A collective has a stream of its own, which its backend orders after
the current one when the collective is issued. This module is about the two other streams: one for copies from the
host's memory and one for copies to it, so that both run beside the computation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, final

import attrs
import torch


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
