"""Which ranks share a shard, and which hold copies of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, final

import attrs
import torch.distributed as dist

from flatparam_comm import c10d_names as c10d
from flatparam_comm.collectives import Collectives
from flatparam_comm.current import current_collectives
from flatparam_comm.process_group import ProcessGroupCollectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology", "resolve_topology"]


@final
@attrs.frozen
class Topology:
    """The groups that data parallelism works over.

    `shard` is the group over which each buffer is cut into shards; `replicate`, where there is one, the group of the
    ranks that hold the same shard.
    """

    shard: Collectives
    replicate: Collectives | None = None

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)


def resolve_topology(
    where: ProcessGroup
    | Collectives
    | DeviceMesh
    | tuple[ProcessGroup | Collectives, ProcessGroup | Collectives]
    | None = None,
) -> Topology:
    """The topology that a user means by what he passes as a process group or a mesh.

    | given | shard | replicate |
    | --- | --- | --- |
    | None | the world of threads this thread is a rank of, else torch's default group | - |
    | a process group, or `Collectives` | it | - |
    | a pair of these | the first | the second |
    | a `DeviceMesh` of one dimension | its group | - |
    | a `DeviceMesh` of two | that of dimension 1 | that of dimension 0 |

    Raises ValueError where there is no group to be found or a mesh has another number of dimensions, TypeError for
    anything else.
    """
    if where is None:
        return Topology(_default_collectives())
    if isinstance(where, tuple):
        if len(where) != 2:
            raise ValueError(f"expected a pair (shard group, replicate group), found a tuple of {len(where)}")
        return Topology(_as_collectives(where[0]), _as_collectives(where[1]))
    if _is_mesh(where):
        return _topology_of_mesh(where)
    return Topology(_as_collectives(where))


def _default_collectives() -> Collectives:
    here = current_collectives()
    if here is not None:
        return here
    group = c10d.default_group()
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
    raise TypeError(
        f"expected None, a ProcessGroup, Collectives, a pair of these or a DeviceMesh, found {type(given).__name__}"
    )


def _is_mesh(given: object) -> TypeGuard[DeviceMesh]:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # it exists only where torch.distributed does

    return isinstance(given, DeviceMesh)


def _topology_of_mesh(mesh: DeviceMesh) -> Topology:
    if mesh.ndim == 1:
        return Topology(ProcessGroupCollectives(mesh.get_group(0)))
    if mesh.ndim == 2:
        return Topology(
            ProcessGroupCollectives(mesh.get_group(1)), ProcessGroupCollectives(mesh.get_group(0))
        )
    raise ValueError(
        f"expected a DeviceMesh of 1 dimension (shard) or 2 (replicate, shard), found {mesh.ndim} of them: "
        f"{mesh.mesh_dim_names}; pass a slice of it, as in mesh['replicate', 'shard']"
    )
