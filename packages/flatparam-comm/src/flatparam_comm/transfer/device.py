"""What orders memory and time on one device: streams and events on an accelerator, nothing on the CPU.

On an accelerator the host runs ahead of the device. Work that is queued on one stream happens in order; two streams are
ordered by events alone. Units compute on whatever stream is current. A collective has a stream of its own, which its
backend orders after the current one when the call is made. What is here are the two other streams: one for copies from
the host's memory and one for copies to it, so that both run beside the computing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, final

import attrs
import torch

__all__ = ["Copies", "CopiesBeside", "Mark", "OnDevice", "Reached"]


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
class Reached:
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
class CopiesBeside:
    """What `Copies` says, from when the copies are queued."""

    end: Mark = attrs.field(factory=Reached)
    """The point that they end at."""
