"""The base of all decorators: it forwards every call that a decorator does not change."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flatparam_comm.collectives import Collectives, Pending, ReduceOp


class ForwardingCollectives(abc.ABC):
    """Derive a decorator of `Collectives` from this and override the methods that it changes; it decorates `inner`.

    A subgroup of a decorated group is decorated the same way (`_decorate`), so that no call escapes the decorator.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Collectives) -> None:
        """Decorate `inner`."""
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def rank(self) -> int:
        """The rank of `inner`."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """The size of `inner`."""
        return self.inner.size

    @property
    def needs_equal_parts(self) -> bool:
        """Whether gathers and reduce-scatters mean more than what moves, so that no other call may take their place."""
        return bool(getattr(self.inner, "needs_equal_parts", False))

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Have `inner` gather."""
        return self.inner.all_gather(output, shard, label=label)

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Have `inner` reduce and scatter."""
        return self.inner.reduce_scatter(output, full, op=op, label=label)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Have `inner` reduce."""
        return self.inner.all_reduce(tensor, op=op, label=label)

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Have `inner` broadcast."""
        return self.inner.broadcast(tensor, root=root, label=label)

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Have `inner` give each rank its elements."""
        return self.inner.all_to_all(output, given, output_numels=output_numels, given_numels=given_numels, label=label)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Have `inner` exchange values."""
        return self.inner.exchange(value, label=label)

    def barrier(self, *, label: str = "") -> None:
        """Have `inner` wait for every rank."""
        self.inner.barrier(label=label)

    def subgroup(self, ranks: Sequence[int]) -> Collectives | None:
        """Decorate the group that `inner` makes like this one."""
        made = self.inner.subgroup(ranks)
        return None if made is None else self._decorate(made)

    @abc.abstractmethod
    def _decorate(self, inner: Collectives) -> Collectives:
        """Decorate `inner` like this object."""
