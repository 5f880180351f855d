"""Full parameters of which a few ranks keep a part each between the forward and the backward pass."""

from __future__ import annotations

import functools
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_comm import Collectives, Pending, Topology
from flatparam_comm.collectives import ContinuedPending
from flatparam_comm.transfer.gather import OwnGather, gather_one
from flatparam_core import FlatLayout

_GROUPS: Final[dict[tuple[Collectives, int], Collectives]] = {}
"""The group of a few ranks that was made of each group. Held for good, so all ranks make it equally often."""


@final
@attrs.define(eq=False)
class KeptParts:
    """The gather of a unit that is resharded to `ranks` ranks after its forward pass; the plan of the unit has it.

    A forward pass gathers the parameters from all ranks. If it is recorded, each rank copies one of `ranks` equal parts
    of what it has gathered, in the dtype of computation. The backward pass gathers these parts from `ranks` ranks that
    are neighbours in the shard group, and drops them. What the forward pass has not left is gathered from all ranks.
    """

    topology: Topology
    """The ranks over which the unit is sharded."""
    ranks: int
    """The ranks that hold all parts; a divisor of the size of the shard group."""
    inner: OwnGather | None
    """The gather from all ranks that the plan of the unit had before."""
    _group: Collectives
    """This rank and its neighbours."""
    _parts: dict[tuple[str, ...], Tensor] = attrs.field(factory=dict)
    """The part of each flat parameter, 1-D, by the names of its parameters."""

    @classmethod
    def over(cls, topology: Topology, ranks: int, inner: OwnGather | None = None) -> Self:
        """Return the gather of a unit; every rank of the shard group calls it, as it may make a group."""
        shard = topology.shard
        if (shard, ranks) not in _GROUPS:
            start = shard.rank - shard.rank % ranks
            rows = [range(first, first + ranks) for first in range(0, shard.size, ranks)]
            made = {row.start: shard.subgroup(row) for row in rows}[start]
            assert made is not None, "this rank is in its own row"
            _GROUPS[shard, ranks] = made
        return cls(topology, ranks, inner, _GROUPS[shard, ranks])

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return type(self)(self.topology, self.ranks, self.inner, self._group)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).over, (self.topology, self.ranks, self.inner)

    @property
    def rounds(self) -> bool:
        """Tell whether the gather from all ranks may round what it gathers."""
        return self.inner is not None and self.inner.rounds

    def gather(
        self, group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, label: str, hook: Any
    ) -> Pending:
        """Issue the gather of `full`; see `flatparam_comm.transfer.gather.OwnGather.gather`."""
        part = self._parts.pop(layout.fqns, None)
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and part is not None and (part.dtype, part.device) == (full.dtype, full.device):
            return self._gather_parts(full, part, label)
        pending = gather_one(group, layout, full, shard, label, hook, self.inner)
        if is_backward or not torch.is_grad_enabled():
            return pending
        return ContinuedPending(pending, functools.partial(self._keep_part, layout, full))

    def _gather_parts(self, full: Tensor, part: Tensor, label: str) -> Pending:
        if part.numel() * self.ranks == full.numel():
            return self._group.all_gather(full, part, label=label)
        padded = full.new_empty(part.numel() * self.ranks)
        pending = self._group.all_gather(padded, part, label=label)
        return ContinuedPending(pending, functools.partial(_fill, full, padded))

    @torch.no_grad()
    def _keep_part(self, layout: FlatLayout, full: Tensor) -> None:
        length = -(-full.numel() // self.ranks)
        own = full[self._group.rank * length :][:length]
        part = self._parts[layout.fqns] = full.new_zeros(length)
        part[: own.numel()].copy_(own)


@torch.no_grad()
def _fill(full: Tensor, padded: Tensor) -> None:
    full.copy_(padded[: full.numel()])
