"""The engine for a world of one rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, final

import attrs
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import Pending, ReduceOp
from flatparam_comm.pending import COMPLETED, copied


@final
@attrs.frozen
class SingleCollectives:
    """Use this if there is only one rank; it needs no process group and works on every device.

    A gather and a reduction copy the input to the output, and do nothing if both are the same memory. A collective is
    complete when the call returns (on CUDA: it is in the current stream).
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Copy `shard`, which is all there is."""
        checks.check_all_gather(checks.site_of(self, "all_gather", label), output, shard)
        return copied(output, shard)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """Copy `full`, whose only slice is this rank's."""
        checks.check_reduce_scatter(checks.site_of(self, "reduce_scatter", label), output, full, op)
        return copied(output, full)

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
        """Copy what this rank gives itself."""
        checks.check_all_to_all(
            checks.site_of(self, "all_to_all", label), output, given, output_numels, given_numels
        )
        return copied(output, given)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return the value, pickled and unpickled as between processes."""
        return [pickle.loads(pickle.dumps(value))]

    def barrier(self, *, label: str = "") -> None:
        """Return at once."""

    def subgroup(self, ranks: Sequence[int]) -> SingleCollectives | None:
        """Return this group, the only one."""
        checks.check_subgroup(checks.site_of(self, "subgroup", ""), ranks)
        return self
