"""The decorator that leaves out communication, to measure its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import COMPLETED, Collectives, Pending, ReduceOp, copied
from flatparam_comm.decorators.forwarding import ForwardingCollectives


@final
class SilentCollectives(ForwardingCollectives):
    """Wrap collectives in this to measure a program without its communication. **The numbers become wrong.**

    A gather only puts this rank's shard in its place (the rest of the output stays as it was), a reduce-scatter only
    copies this rank's slice, an all-to-all only what a rank gives itself; all-reduce and broadcast do nothing.
    Arguments are checked and the control plane is real.
    """

    __slots__ = ()

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Copy `shard` to its place in `output`."""
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        return copied(_slice_of(output, self.rank, shard.numel()), shard)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """Copy this rank's slice of `full` to `output`."""
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        return copied(output, _slice_of(full, self.rank, output.numel()))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_all_reduce(checks.site_of(self, "all_reduce", label), tensor, op)
        return COMPLETED

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Leave `tensor` as it is."""
        checks.check_broadcast(checks.site_of(self, "broadcast", label), tensor, root)
        return COMPLETED

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Copy what this rank gives itself to its place in `output`."""
        checks.check_all_to_all(
            checks.site_of(self, "all_to_all", label), output, given, output_numels, given_numels
        )
        target, own = output_numels[: self.rank], given_numels[: self.rank]
        numel = given_numels[self.rank]
        return copied(output.detach()[sum(target) :][:numel], given.detach()[sum(own) :][:numel])

    def _decorate(self, inner: Collectives) -> Collectives:
        return SilentCollectives(inner)


def _slice_of(whole: Tensor, rank: int, numel: int) -> Tensor:
    return whole.detach()[rank * numel : (rank + 1) * numel]
