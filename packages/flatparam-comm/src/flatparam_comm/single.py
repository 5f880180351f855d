"""Engines that move nothing: for a world of one rank, and for a group that only knows its size and this rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, final

import attrs
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import COMPLETED, ExchangesValues, Pending, ReduceOp, copied
from flatparam_comm.decorators.forwarding import OneDoorCollectives
from flatparam_comm.errors import CollectiveError


class OwnPartOnly:
    """The data plane of one rank that neither sends nor receives: what it gives itself is copied, if it is elsewhere.

    A collective is complete when the call returns (on CUDA: it is in the current stream). Arguments are checked as by
    any engine. `rank` and `size` are the subclass's own.
    """

    __slots__ = ()

    def all_gather(self: ExchangesValues, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Copy `shard` to its place in `output`."""
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        return copied(_slice_of(output, self.rank, shard.numel()), shard)

    def reduce_scatter(
        self: ExchangesValues, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """Copy this rank's slice of `full` to `output`."""
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        return copied(output, _slice_of(full, self.rank, output.numel()))

    def all_reduce(self: ExchangesValues, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_all_reduce(checks.site_of(self, "all_reduce", label), tensor, op)
        return COMPLETED

    def broadcast(self: ExchangesValues, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_broadcast(checks.site_of(self, "broadcast", label), tensor, root)
        return COMPLETED

    def all_to_all(
        self: ExchangesValues,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Copy what this rank gives itself to its place in `output`."""
        checks.check_all_to_all(checks.site_of(self, "all_to_all", label), output, given, output_numels, given_numels)
        target, own = sum(output_numels[: self.rank]), sum(given_numels[: self.rank])
        numel = given_numels[self.rank]
        return copied(output.detach()[target:][:numel], given.detach()[own:][:numel])


def _slice_of(whole: Tensor, rank: int, numel: int) -> Tensor:
    return whole if numel == whole.numel() else whole.detach()[rank * numel : (rank + 1) * numel]


@final
@attrs.frozen
class SingleCollectives(OwnPartOnly):
    """Use this if there is only one rank; it needs no process group and works on every device.

    A gather and a reduction copy the input to the output, and do nothing if both are the same memory.
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return the value, pickled and unpickled as between processes."""
        return [pickle.loads(pickle.dumps(value))]

    def barrier(self, *, label: str = "") -> None:
        """Return at once."""

    def subgroup(self, ranks: Sequence[int]) -> SingleCollectives | None:
        """Return this group, the only one."""
        checks.check_subgroup(checks.site_of(self, "subgroup", ""), ranks)
        return self


class HasRanks(Protocol):
    """The two methods of torch's process groups that a stand-in has, as tests of wrapping make them."""

    def rank(self) -> int:
        """Return this rank's number."""

    def size(self) -> int:
        """Return the number of ranks."""


@final
@attrs.frozen
class RanksOnly(OneDoorCollectives):
    """Collectives over a stand-in: a module can be sharded over them, and every call that communicates raises an error.

    `rank` and `size` ask the stand-in each time.
    """

    group: HasRanks

    @property
    def rank(self) -> int:
        """The stand-in's rank."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """The stand-in's size."""
        return int(self.group.size())

    def _call(self, name: str, /, *args: Any, **options: Any) -> NoReturn:
        raise CollectiveError(
            self.rank,
            name,
            options.get("label", ""),
            f"expected a process group that communicates, found a {type(self.group).__name__}, which only has rank() "
            "and size(): a module can be sharded over it, not called, saved or loaded; pass a "
            "torch.distributed.ProcessGroup",
        )
