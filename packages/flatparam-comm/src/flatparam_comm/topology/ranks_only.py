"""A group that only knows its size and this rank: enough to shard, not to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, final

import attrs
from torch import Tensor

from flatparam_comm.collectives import Collectives, Pending, ReduceOp
from flatparam_comm.errors import CollectiveError


class HasRanks(Protocol):
    """The two methods of torch's process groups that a stand-in has, as tests of wrapping make them."""

    def rank(self) -> int:
        """Return this rank's number."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
        ...


@final
@attrs.frozen
class RanksOnly:
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

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Raise CollectiveError."""
        self._refuse("all_gather", label)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """Raise CollectiveError."""
        self._refuse("reduce_scatter", label)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Raise CollectiveError."""
        self._refuse("all_reduce", label)

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Raise CollectiveError."""
        self._refuse("broadcast", label)

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Raise CollectiveError."""
        self._refuse("all_to_all", label)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Raise CollectiveError."""
        self._refuse("exchange", label)

    def barrier(self, *, label: str = "") -> None:
        """Raise CollectiveError."""
        self._refuse("barrier", label)

    def subgroup(self, ranks: Sequence[int]) -> Collectives | None:
        """Raise CollectiveError."""
        self._refuse("subgroup", "")

    def _refuse(self, op: str, label: str) -> NoReturn:
        raise CollectiveError(
            self.rank,
            op,
            label,
            f"expected a process group that communicates, found a {type(self.group).__name__}, which only has rank() "
            "and size(): a module can be sharded over it, not called, saved or loaded; pass a "
            "torch.distributed.ProcessGroup",
        )
