"""The groups of ranks that parameters are sharded over and copied over."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

import attrs

from flatparam_comm.collectives import Collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology"]

T = TypeVar("T")


@final
@attrs.frozen
class Topology:
    """The groups that data parallelism works over.

    `shard` is the group over which each buffer is cut into shards; `replicate`, if there is one, is the group of the
    ranks that hold the same shard. `mesh` is the mesh that the two were taken from, if there was one.
    """

    shard: Collectives
    replicate: Collectives | None = None
    mesh: DeviceMesh | None = attrs.field(default=None, eq=False, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        # A copy of a model works over the same ranks.
        return self

    @property
    def group(self) -> Collectives:
        """The group whose first rank speaks for all: the shard group, or the replicate group if nothing is sharded."""
        return self.replicate if self.replicate is not None and self.shard.size == 1 else self.shard

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that a gradient is averaged over."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)

    def exchange(self, value: T, *, label: str = "") -> list[T]:
        """The `value` of every data-parallel rank, in rank order, replica by replica; every one of them calls it."""
        known = [value]
        for group in (self.shard, self.replicate):
            if group is not None and group.size > 1:
                known = [item for items in group.exchange(known, label=label) for item in items]
        return known
