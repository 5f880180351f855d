"""The ranks that hold the pieces of a `ShardedTensor`: those of the shard group, or all data-parallel ranks.

`torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict` makes chunks for every rank in the world,
whatever the model is sharded over. So with NO_SHARD and HYBRID_SHARD the pieces lie in several replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs
import torch

from flatparam_runtime import Collectives, Topology, process_group_of
from flatparam_state.forms.tiling import Gathers, Started, ranks_in

__all__ = ["EveryRank", "holders_of"]


@final
@attrs.frozen
class EveryRank:
    """All data-parallel ranks, replica by replica, as one group that gathers tensors."""

    shard: Collectives
    replicate: Collectives

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicate.size * self.shard.size

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Started:
        """Fill `output` with the `shard` of each rank, in their order; every one of them calls it.

        The shard group is waited for here. `shard` may be this rank's place in `output`.
        """
        width = shard.numel() * self.shard.size
        replica = output[self.replicate.rank * width :][:width]
        self.shard.all_gather(replica, shard, label=label).wait()
        return self.replicate.all_gather(output, replica, label=label)


def holders_of(tensor: Any, topology: Topology) -> tuple[Gathers, Mapping[int, int]]:
    """Return those that can put `tensor`, a `ShardedTensor`, together, and their numbers by their ranks in the world.

    Every data-parallel rank calls it. All of them come to the same, although one replica may hold every piece: a tensor
    belongs to the shard group if that is the process group which the tensor was made over.
    """
    near = ranks_in(topology.shard)
    if topology.replicate is None or topology.replicate.size == 1 or _ranks_of(tensor) == near.keys():
        return topology.shard, near
    known = topology.exchange(_rank_in_world(topology), label="ranks of a sharded state")
    ranks = {rank: number for number, rank in enumerate(known)}
    return EveryRank(topology.shard, topology.replicate), ranks


def _ranks_of(tensor: Any) -> set[int]:
    """Return the ranks of the world that `tensor` was made over, also those that hold no piece."""
    # No public name has the group of a ShardedTensor.
    return set(torch.distributed.get_process_group_ranks(tensor._process_group))


def _rank_in_world(topology: Topology) -> int:
    groups = (topology.shard, topology.replicate)
    if any(group is not None and process_group_of(group) is not None for group in groups):
        return torch.distributed.get_rank()
    return topology.shard.rank
