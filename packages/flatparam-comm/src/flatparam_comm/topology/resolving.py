"""Topologies from a process group, a mesh, a name, nothing or a pickle."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeGuard

import attrs
import torch.distributed as dist

from flatparam_comm.addons import say_once
from flatparam_comm.collectives import Collectives
from flatparam_comm.hosts import host_identity
from flatparam_comm.process_group import groups
from flatparam_comm.process_group.engine import ProcessGroupCollectives
from flatparam_comm.single import HasRanks, RanksOnly, SingleCollectives
from flatparam_comm.threads.current import current_collectives
from flatparam_comm.topology.topology import Topology
from flatparam_comm.topology.transports import (
    UNSHARED,
    CannotShareError,
    as_process_group,
    shared_memory_transport,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def resolve_topology(
    where: ProcessGroup
    | Collectives
    | DeviceMesh
    | str
    | tuple[ProcessGroup | Collectives | str, ProcessGroup | Collectives]
    | None = None,
) -> Topology:
    """Return the topology that a user's process group, mesh or name stands for.

    | given | shard | replicate |
    | --- | --- | --- |
    | None | the world of threads that this thread is a rank of, else torch's default group | - |
    | `"shared_memory"` | the group of None, through memory that its ranks share: they are on one host | - |
    | `"auto"` | the same if its ranks can share memory, else the group of None | - |
    | a process group, or `Collectives` | that group | - |
    | a pair of these | the first | the second |
    | a pair of a name and one of these | by that name, the ranks of this host in the group of None | the second |
    | a `DeviceMesh` of one dimension | its group | - |
    | a `DeviceMesh` of two | the group of dimension 1 | the group of dimension 0 |
    | a stand-in with `rank()` and `size()` | the stand-in: enough to shard, not to communicate | - |

    `with_shared_memory` does for a topology, such as that of a mesh, what `"auto"` does for a group.

    Raises ValueError if there is no group, if ranks that are to share memory cannot, if the groups of a pair have more
    than this rank in common, or if a mesh has a different number of dimensions; TypeError for anything else.
    """
    if where is None:
        return Topology(_default_collectives())
    if isinstance(where, tuple):
        if len(where) != 2:
            raise ValueError(f"expected a pair (shard group, replicate group), found a tuple of {len(where)}")
        shard, replicate = where
        here = _by_name(shard, _on_this_host) if isinstance(shard, str) else _as_collectives(shard)
        copies = _as_collectives(replicate)
        _check_pair(here, copies)
        return Topology(here, copies)
    if isinstance(where, str):
        return Topology(_by_name(where, _default_collectives))
    if _is_mesh(where):
        return _topology_of_mesh(where)
    return Topology(_as_collectives(where))


def _check_pair(shard: Collectives, replicate: Collectives) -> None:
    """Check that the ranks that share parameters and those that hold copies have this rank in common, and no other."""
    if not (isinstance(shard, ProcessGroupCollectives) and isinstance(replicate, ProcessGroupCollectives)):
        return
    sharing, holding = groups.members_of(shard.group), groups.members_of(replicate.group)
    both = sorted({*sharing} & {*holding})
    if len(both) != 1:
        raise ValueError(
            f"rank {shard.rank} of its shard group: expected a pair (shard group, replicate group) that have this rank "
            f"in common and no other, found the ranks {sharing} and {holding}, which have {both} in common; the "
            "replicate group has the ranks that hold the same shard, one of each shard group"
        )


def with_shared_memory(topology: Topology) -> Topology:
    """Return the same topology, with shared memory for each group that lies on one host.

    So a shard group within a host is fast, and a replicate group across hosts keeps its process group. Every rank calls
    this function. Groups of a different engine and decorated groups stay as they are.
    """
    replicate = topology.replicate
    return attrs.evolve(
        topology,
        shard=_shared_if_possible(topology.shard),
        replicate=None if replicate is None else _shared_if_possible(replicate),
    )


def _shared_if_possible(group: Collectives) -> Collectives:
    transport = shared_memory_transport()
    if not isinstance(group, ProcessGroupCollectives):
        return group
    if transport is None:
        say_once(UNSHARED)
        return group
    try:
        return transport.connected(group)
    except CannotShareError:
        return group


def _by_name(name: str, find: Callable[[], Collectives]) -> Collectives:
    """Return the collectives that `find` returns, over the transport of this name."""
    if name == "shared_memory":
        transport = shared_memory_transport()
        if transport is None:
            raise ModuleNotFoundError(
                "expected the add-on flatparam-onehost for 'shared_memory', which is not installed: pip install "
                "flatparam-onehost; or pass 'auto', or the process group itself",
                name="flatparam_onehost",
            )
        return transport.shared_memory(find())
    if name == "auto":
        return _shared_if_possible(find())
    raise _not_ranks(name)


def _on_this_host() -> Collectives:
    """Return the ranks of the default group that are on this host."""
    world = as_process_group(_default_collectives())
    found = _HOST_GROUPS.get(world.group)
    if found is None:
        hosts: list[tuple[str, ...]] = world.exchange(host_identity(), label="hosts")
        made = [
            world.subgroup([rank for rank, other in enumerate(hosts) if other == host]) for host in dict.fromkeys(hosts)
        ]
        found = next(group for group in made if group is not None)
        _HOST_GROUPS[world.group] = found
    return found


#: The groups that `_on_this_host` has made, by the group that contains them.
_HOST_GROUPS: Final[weakref.WeakKeyDictionary[ProcessGroup, ProcessGroupCollectives]] = weakref.WeakKeyDictionary()


def _default_collectives() -> Collectives:
    here = current_collectives()
    if here is not None:
        return here
    group = groups.default_group()
    if group is None:
        raise ValueError(
            "expected to be started as one of several ranks, found no process group: start the program with torchrun "
            "and call torch.distributed.init_process_group(); or call it in flatparam_comm.run_threads(); "
            "or pass SingleCollectives() for a world of one"
        )
    return ProcessGroupCollectives(group)


def _as_collectives(given: object) -> Collectives:
    # Process groups first: they have methods of the same names (and `rank` is not a property there).
    if dist.is_available() and isinstance(given, dist.ProcessGroup):
        return ProcessGroupCollectives(given)
    if isinstance(given, Collectives):
        return given
    if dist.is_available() and given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "expected a process group that this process is in, found one that new_group() made for other ranks: "
            "pass each rank the group that it is in"
        )
    if callable(getattr(given, "rank", None)) and callable(getattr(given, "size", None)):
        stand_in: HasRanks = given  # type: ignore[assignment]  # both methods were just checked
        return RanksOnly(stand_in) if stand_in.size() > 1 else SingleCollectives()
    raise _not_ranks(given)


def _not_ranks(given: object) -> TypeError:
    found = f"{type(given).__name__} {given!r}" if isinstance(given, str) else type(given).__name__
    return TypeError(
        "expected None, 'auto', 'shared_memory', a ProcessGroup, Collectives, a pair of these or a DeviceMesh, "
        f"found {found}"
    )


def _is_mesh(given: object) -> TypeGuard[DeviceMesh]:
    if not dist.is_available():
        return False
    # This module exists only if torch.distributed does.
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(given, DeviceMesh)


def _topology_of_mesh(mesh: DeviceMesh) -> Topology:
    if mesh.ndim == 1:
        return Topology(ProcessGroupCollectives(mesh.get_group(0)), mesh=mesh)
    if mesh.ndim == 2:
        shard, replicate = (ProcessGroupCollectives(mesh.get_group(dimension)) for dimension in (1, 0))
        return Topology(shard, replicate, mesh)
    raise ValueError(
        f"expected a DeviceMesh of 1 dimension (shard) or 2 (replicate, shard), found {mesh.ndim} of them: "
        f"{mesh.mesh_dim_names}; pass a slice of it, as in mesh['replicate', 'shard']"
    )


def _same_again(shard: tuple[int, int], replicate: tuple[int, int] | None, shared: bool = False) -> Topology:
    """Return a pickled topology, restored in a world of the same size; every rank passes its own values.

    Args:
        shard: the size of the shard group, and this rank's number in it.
        replicate: the same of the replicate group; the ranks of one shard group are consecutive in the world.
        shared: whether groups on one host go through shared memory.

    Raises:
        ValueError: in a world of a different size, or on a different rank.
    """
    topology = _laid_out(shard, replicate)
    return with_shared_memory(topology) if shared else topology


def _laid_out(shard: tuple[int, int], replicate: tuple[int, int] | None) -> Topology:
    (shards, position), (copies, which) = shard, replicate or (1, 0)
    if shards * copies == 1:
        alone = SingleCollectives()
        return Topology(alone, None if replicate is None else alone)
    world = _default_collectives()
    if (world.size, world.rank) != (shards * copies, which * shards + position):
        raise ValueError(
            f"a model that was pickled on rank {which * shards + position} of {shards * copies} can be read on that "
            f"rank only, found rank {world.rank} of {world.size}; save its state_dict() instead"
        )
    if replicate is None:
        return Topology(world)
    if shards == 1:
        return Topology(SingleCollectives(), world)
    if copies == 1:
        return Topology(world, SingleCollectives())
    return Topology.cut(world, [range(start, start + shards) for start in range(0, world.size, shards)])


def _reduced(topology: Topology) -> tuple[object, ...]:
    """Return the pickled form of a topology: how many ranks there were, and which of them this one was."""
    replicate = None if topology.replicate is None else (topology.replicate.size, topology.replicate.rank)
    transport = shared_memory_transport()
    shared = transport is not None and (transport.is_shared(topology.shard) or transport.is_shared(topology.replicate))
    return _same_again, ((topology.shard.size, topology.shard.rank), replicate, shared)


copyreg.pickle(Topology, _reduced)  # type: ignore[arg-type]  # a reduction may name any function
