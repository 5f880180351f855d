"""The facts of torch's process groups that the guard asks for, beyond those that collectives need.

| private name of torch | what it tells | if it is gone |
| --- | --- | --- |
| `distributed_c10d._world` | the groups that this process is in | none are known |
| `ProcessGroup._get_sequence_number_for_group` | the collectives that were issued on a group | none are counted |
| `ProcessGroupGloo.Options._devices` | how many connections gloo has to a peer | the first one is closed |
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from flatparam_comm.process_group import c10d, groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The backends whose groups are of several processes.
_BETWEEN_PROCESSES: Final = ("gloo", "nccl", "xccl", "mpi", "ucc")


def group_or_default(found: object) -> ProcessGroup | None:
    """Return the group that a call of torch is about which was given this one, or none."""
    return found if isinstance(found, dist.ProcessGroup) else groups.default_group()


def group_named(name: str) -> ProcessGroup | None:
    """Return the group of this process with this name; None if there is none."""
    return next((group for group, each in known_groups() if each == name), None)


def known_groups() -> list[tuple[ProcessGroup, str]]:
    """Return the groups that this process is in, with their names."""
    names: dict[Any, str] = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", {})
    return [(group, str(name)) for group, name in [*names.items()] if isinstance(group, dist.ProcessGroup)]


def is_between_processes(group: ProcessGroup) -> bool:
    """Return whether the group's backends connect processes: others, such as a fake one, only stand for groups."""
    config = str(c10d.first_of("get_backend_config")(group))
    return any(backend in config for backend in _BETWEEN_PROCESSES)


def count_of(group: ProcessGroup) -> int:
    """Return the collectives that this process has issued on a group, as torch counts them; 0 if it does not."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # torch does not declare it
    except (AttributeError, RuntimeError):
        return 0


def source_file() -> str:
    """Return the file of torch's collectives."""
    return str(dist.distributed_c10d.__file__)


def stop_waiting(group: ProcessGroup) -> None:
    """Make everything that this process waits for on a gloo group fail at once; the group is of no use any more.

    gloo has no call for this, and ignores `abort` and `shutdown`. But if a receive times out, it closes all of the
    group's connections. A receive from a rank that has closed its own connection does not time out, so each rank is
    tried. For a different backend nothing happens.
    """
    if groups.cpu_backend(group) != "gloo":
        return
    backend = c10d.backend_of(group, torch.device("cpu"))
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    for tag, peer in itertools.product(range(_connections_of(backend)), peers):
        # The error is the timeout; or the connection was closed before.
        with suppress(RuntimeError):
            backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))


def _connections_of(backend: Any) -> int:
    """Return the number of connections that a backend of gloo has to each peer; the tag of a message chooses one."""
    return len(getattr(getattr(backend, "options", None), "_devices", [None]))
