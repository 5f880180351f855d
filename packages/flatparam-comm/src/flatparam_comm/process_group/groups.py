"""The process groups of torch: what is known of one, what its ranks tell each other, and how one is made.

torch names a group that only its own ranks make after a count that each rank keeps: up to 2.13 of the groups that the
rank is in, and since 2.14 of the groups that it made, a count that also names the groups that all ranks make. If ranks
have made different groups before, they would wait for groups of different names. So this file names such groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist

from flatparam_comm.process_group.c10d import (
    all_gather,
    backend_of,
    first_of,
    making_apart,
    time_limit_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
from collections.abc import Callable

from torch import Tensor


def default_group() -> ProcessGroup | None:
    """torch's default process group, or None if there is none (yet)."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def name_of(group: ProcessGroup) -> str:
    """Return the name of a group, which is the same on all of its ranks."""
    return str(group.group_name)


def store_of(group: ProcessGroup, prefix: str, timeout: timedelta) -> Any:
    """A connection of its own to the group's store, with keys that begin with `prefix`; None if there is none."""
    store = served_store_of(group)
    if store is None or not hasattr(store, "clone"):
        return None
    own = store.clone()
    own.set_timeout(timeout)
    return first_of("PrefixStore")(prefix, own)


def served_store_of(group: ProcessGroup) -> Any:
    """The group's store itself, whose server may live in this process, and ends with it; None if there is none."""
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def cpu_backend(group: ProcessGroup) -> str:
    """Return the name of the group's backend for CPU tensors, in lower case; empty if there is none."""
    backend = backend_of(group, torch.device("cpu"))
    return "" if backend is None else str(backend.name()).lower()


def exchange(value: object, group: ProcessGroup) -> list[Any]:
    """Return every rank's value, in the order of the group's ranks."""
    device = _control_device(group)
    gathered = exchange_bytes(
        pickle.dumps(value), group.size(), lambda output, shard: all_gather(output, shard, group).wait(), device
    )
    return [pickle.loads(each) for each in gathered]


def _control_device(group: ProcessGroup) -> torch.device:
    """Return the device that small facts travel on: the CPU, unless the group has no backend there."""
    if not torch.accelerator.is_available() or has_cpu_backend(group):
        return torch.device("cpu")
    return current_device()


def current_device() -> torch.device:
    """Return the accelerator's device that this thread works on; there must be an accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "the caller has looked for an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_cpu_backend(group: ProcessGroup) -> bool:
    """Return whether the group moves CPU tensors at all."""
    return "cpu" in first_of("get_backend_config")(group)


def members_of(group: ProcessGroup) -> list[int]:
    """Return the numbers that the group's ranks have in the world, in the order of the group."""
    return list(first_of("get_process_group_ranks")(group))


def barrier(group: ProcessGroup) -> None:
    """Return when every rank of the group has called it."""
    # Without the device NCCL guesses one from the global rank, and warns.
    device = _control_device(group)
    devices = None if device.type == "cpu" else [device.index]
    first_of("barrier")(group=group, device_ids=devices)


def new_subgroup(group: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup | None:
    """Return a new process group of some of this group's ranks, with its backends and its timeout; None on the others.

    The numbers are those within `group`. Every rank of `group` calls it.
    """
    members = members_of(group)
    chosen = [members[rank] for rank in ranks]
    options = {"backend": first_of("get_backend_config")(group), "timeout": timeout_of(group)}
    is_member = members.index(first_of("get_rank")()) in ranks
    made: ProcessGroup
    if len(members) == first_of("get_world_size")():
        made = first_of("new_group")(chosen, **options)
        return made if is_member else None
    # torch's default is that every rank of the *world* must call; inside a smaller group only its members can.
    name = _NAMES.agree(group, chosen)
    if not is_member:
        return None
    with making_apart(name):
        made = first_of("new_group")(chosen, use_local_synchronization=True, **options)
    return made


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the time limit of the group's collectives, or None if no backend tells it.

    Without it, a subgroup of a group with a limit of 10 seconds would wait for torch's 30 minutes.
    """
    accelerator = torch.accelerator.current_accelerator()
    for device in (accelerator or torch.device("cuda"), torch.device("cpu")):
        timeout = time_limit_of(backend_of(group, device))
        if timeout is not None:
            return timeout
    return None


@final
class _Names:
    """The names of groups that are made inside a group: the same on all of its ranks, whatever groups these made."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Begin with a process that has made no such group."""
        self._last = 0

    def agree(self, group: ProcessGroup, ranks: Sequence[int]) -> str:
        """Return a name that no group of these ranks has had. Every rank of `group` calls it, and gets the same."""
        self._last = 1 + max(exchange(self._last, group))
        return f"flatparam {self._last}: {' '.join(map(str, ranks))}"


_NAMES: Final = _Names()


def exchange_bytes(
    mine: bytes, size: int, gather: Callable[[Tensor, Tensor], None], device: torch.device
) -> list[bytes]:
    """Return the bytes of each of `size` ranks, in rank order.

    `gather(output, shard)` fills `output` with every rank's `shard`; both are on `device`. Unlike torch's own function
    for objects, this one needs no numpy.
    """
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    sizes = torch.empty(size, dtype=torch.int64, device=device)
    gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    numels = sizes.tolist()
    longest = max(numels)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = torch.empty(size * longest, dtype=torch.uint8, device=device)
    gather(gathered, padded)
    rows = zip(gathered.view(size, longest), numels, strict=True)
    return [bytes(row[:numel].tolist()) for row, numel in rows]
