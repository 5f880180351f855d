"""One rank of a world whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import Collectives, Parts, Pending, ReduceOp, SingleCollectives, Topology
from flatparam_plan.plan_error import PlanError

TRANSPORTS: Final = ("direct", "gloo", "shared_memory")
"""How bytes travel, as far as a rank's memory shows it.

`direct` needs no memory of torch's, as NCCL. `gloo` receives everybody's gradients in a buffer of its own if there are
more than two ranks. `shared_memory` takes large gradients from where autograd left them.
"""


@final
@attrs.frozen(eq=False)
class Call:
    """A collective that a lone rank was asked for."""

    op: str
    label: str
    nbytes: int
    """The bytes of the full buffer."""
    members: tuple[int, ...]
    """The ranks of the world that take part."""


@attrs.frozen(eq=False)
class _Issued:
    """The pending of a collective that is over at once."""

    ranks: LoneRank
    call: Call
    held: tuple[Tensor, ...] = ()
    """Memory that is kept until the first wait."""
    waited: list[bool] = attrs.field(factory=list)

    def wait(self) -> None:
        """Tell the observer, the first time."""
        if not self.waited:
            self.waited.append(True)
            object.__setattr__(self, "held", ())
            self.ranks.tell("waited", self.call)

    def done(self) -> bool:
        """Return whether somebody has waited: until then a real one may be under way."""
        return bool(self.waited)


@final
@attrs.frozen(eq=False)
class LoneRank:
    """Collectives of one rank in a world where everybody else has its parameters and no gradients.

    A gather repeats this rank's shard, a sum is this rank's own value, and an exchange repeats this rank's value.
    Nothing is sent. So a program runs as one of thousands of ranks does, in one process.
    """

    members: tuple[int, ...]
    """The ranks of the world in this group, in order."""
    world_rank: int
    transport: str = "direct"
    on_call: Callable[[str, Call], None] | None = None
    """Is told "issued" and "waited", with the collective."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.members.index(self.world_rank)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.members)

    def tell(self, what: str, call: Call) -> None:
        """Tell the observer, if there is one."""
        if self.on_call is not None:
            self.on_call(what, call)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Fill `output` with copies of this rank's shard."""
        pending = self._issue("all_gather", label, output)
        with torch.no_grad():
            output.detach().view(self.size, -1).copy_(shard.detach().expand(self.size, -1))
        self.tell("moved", pending.call)
        return pending

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Copy this rank's slice of `full` to `output`."""
        pending = self._issue("reduce_scatter", label, full)
        held: tuple[Tensor, ...] = ()
        if self.transport == "gloo" and op is ReduceOp.SUM and full.is_floating_point():
            own = full.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            if self.size > 2 or own:
                held = (torch.empty_like(full),)
        start = self.rank * output.numel()
        if output.data_ptr() != full.data_ptr() + start * full.itemsize:
            with torch.no_grad():
                output.detach().copy_(full.detach()[start : start + output.numel()])
        self.tell("moved", pending.call)
        return attrs.evolve(pending, held=held, waited=pending.waited)

    @property
    def reduce_scatter_parts(self) -> Callable[..., Pending]:
        """Return a method that reads gradients where autograd left them; only shared memory has it."""
        if self.transport != "shared_memory":
            raise AttributeError(f"expected a transport that takes parts, found {self.transport!r}")
        return self._reduce_scatter_parts

    def _reduce_scatter_parts(self, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        pending = self._issue("reduce_scatter", label, full)
        with torch.no_grad():
            full.fill(self.rank * output.numel(), output.detach())
        return self._moved(pending)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        return self._moved(self._issue("all_reduce", label, tensor))

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        return self._moved(self._issue("broadcast", label, tensor))

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Fill `output` with zeros, as everybody else's."""
        pending = self._issue("all_to_all", label, given)
        with torch.no_grad():
            output.detach().zero_()
        return self._moved(pending)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return this rank's value, as everybody's."""
        return [value] * self.size

    def barrier(self, *, label: str = "") -> None:
        """Return at once."""

    def subgroup(self, ranks: Sequence[int]) -> LoneRank | None:
        """Return the group of some of the ranks, if this rank is one of them."""
        members = tuple(self.members[rank] for rank in ranks)
        return attrs.evolve(self, members=members) if self.world_rank in members else None

    def _issue(self, op: str, label: str, full: Any) -> _Issued:
        call = Call(op, label, full.numel() * full.dtype.itemsize, self.members)
        self.tell("issued", call)
        return _Issued(self, call)

    def _moved(self, pending: _Issued) -> _Issued:
        self.tell("moved", pending.call)
        return pending


def lone_topology(
    world_size: int,
    rank: int,
    *,
    shard_size: int,
    transport: str = "direct",
    decorate: Callable[[Collectives], Collectives] = lambda group: group,
    on_call: Callable[[str, Call], None] | None = None,
) -> Topology:
    """Return the groups of `rank` in a world of `world_size`, whose parameters are sharded over `shard_size` ranks.

    Raises:
        PlanError: if the numbers do not fit.
    """
    if world_size % shard_size or not 0 <= rank < world_size:
        raise PlanError(
            f"expected a rank below the world size and shards over a divisor of it, found rank {rank} of {world_size} "
            f"and shards over {shard_size} ranks"
        )
    if transport not in TRANSPORTS:
        raise PlanError(f"expected a transport among {', '.join(TRANSPORTS)}, found {transport!r}")
    start = rank - rank % shard_size

    def group(members: range) -> Collectives:
        if len(members) == 1:
            return SingleCollectives()
        return decorate(LoneRank(tuple(members), rank, transport, on_call))

    shard = group(range(start, start + shard_size))
    if shard_size == world_size:
        return Topology(shard)
    return Topology(shard, group(range(rank % shard_size, world_size, shard_size)))
