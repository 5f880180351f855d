"""The seam to transports: engines that move bytes beside the backend of a process group, found by name.

The entry points `flatparam.transports` name them. `"shared_memory"` is that of flatparam-onehost.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, Protocol

import torch.distributed as dist

from flatparam_comm.addons import module_behind
from flatparam_comm.collectives import Collectives
from flatparam_comm.process_group.engine import ProcessGroupCollectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UNSHARED: Final = (
    "flatparam-onehost is not installed: the ranks of one host use the backend of their process group instead of "
    "shared memory; pip install flatparam-onehost"
)
"""The warning if ranks of one host cannot share memory."""


class CannotShareError(ValueError):
    """The ranks of a group cannot share memory; the message, alike on all of them, says why."""


class Transport(Protocol):
    """A module that an entry point `flatparam.transports` names."""

    def shared_memory(self, group: ProcessGroup | Collectives) -> Collectives:
        """Return the collectives of `group` over this transport; the same object each time.

        Raises:
            ValueError: on every rank, if the ranks cannot use it; it says what is missing.
        """

    def connected(self, group: ProcessGroupCollectives) -> Collectives:
        """Return the collectives of `group` over this transport; every rank calls it.

        Raises:
            CannotShareError: on every rank, if they cannot use it.
        """

    def is_shared(self, group: Collectives | None) -> bool:
        """Return whether `group` works over this transport."""


@functools.cache
def shared_memory_transport() -> Transport | None:
    """Return the transport through shared memory, imported on the first call; None if none is installed."""
    found: Transport | None = module_behind("flatparam.transports", "shared_memory", "flatparam_onehost")
    return found


def as_process_group(group: ProcessGroup | Collectives) -> ProcessGroupCollectives:
    """Return the collectives over a process group whose ranks are to share memory.

    Raises:
        ValueError: for a different engine, or for decorated collectives (decorate the result instead).
    """
    # Process groups first: they have methods of the same names.
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return ProcessGroupCollectives(group)
    if isinstance(group, ProcessGroupCollectives):
        return group
    raise ValueError(
        f"expected a process group whose ranks are to share memory, found {group!r}; shared memory is for the "
        "processes of a process group, and decorators go around it"
    )
