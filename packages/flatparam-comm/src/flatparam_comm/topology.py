"""Which ranks share a shard, and which hold copies of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs

from flatparam_comm.collectives import Collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology"]


@final
@attrs.frozen
class Topology:
    """The groups that data parallelism works over.

    `shard` is the group over which each buffer is cut into shards; `replicate`, where there is one, the group of the
    ranks that hold the same shard. `mesh` is the mesh that the two were taken from, where there was one.
    """

    shard: Collectives
    replicate: Collectives | None = None
    mesh: DeviceMesh | None = attrs.field(default=None, eq=False, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        return self  # a copy of a model works over the same ranks

    @property
    def group(self) -> Collectives:
        """The ranks of which the first speaks for all: those that share a buffer, or else those that hold copies."""
        return self.replicate if self.replicate is not None and self.shard.size == 1 else self.shard

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)
