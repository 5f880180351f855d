"""The bases of decorators and of engines that do the same for every collective: all calls pass by one method."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flatparam_comm.collectives import Collectives, Pending, ReduceOp


class OneDoorCollectives(abc.ABC):
    """Derive from this to have each collective go through `_call`; the rank and the size are the subclass's own."""

    __slots__ = ()

    @abc.abstractmethod
    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Do the collective with this name and these arguments; `options["label"]` is the caller's label, if any."""

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather."""
        return self._call("all_gather", output, shard, label=label)  # type: ignore[no-any-return]

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce and scatter."""
        return self._call("reduce_scatter", output, full, op=op, label=label)  # type: ignore[no-any-return]

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce."""
        return self._call("all_reduce", tensor, op=op, label=label)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Broadcast."""
        return self._call("broadcast", tensor, root=root, label=label)  # type: ignore[no-any-return]

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Give each rank its elements."""
        numels = {"output_numels": output_numels, "given_numels": given_numels}
        return self._call("all_to_all", output, given, **numels, label=label)  # type: ignore[no-any-return]

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Exchange values."""
        return self._call("exchange", value, label=label)  # type: ignore[no-any-return]

    def barrier(self, *, label: str = "") -> None:
        """Wait for every rank."""
        self._call("barrier", label=label)

    def subgroup(self, ranks: Sequence[int]) -> Collectives | None:
        """Make a group of these ranks."""
        return self._call("subgroup", ranks)  # type: ignore[no-any-return]


class ForwardingCollectives(OneDoorCollectives):
    """Derive a decorator of `Collectives` from this, and override the methods that it changes; it decorates `inner`.

    All others are calls of `inner`, through `_call`. A subgroup of a decorated group is decorated the same way
    (`_decorate`), so that no call escapes the decorator.
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

    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Have `inner` do it, and decorate a group that it makes like this one."""
        done = getattr(self.inner, name)(*args, **options)
        return self._decorate(done) if name == "subgroup" and done is not None else done

    @abc.abstractmethod
    def _decorate(self, inner: Collectives) -> Collectives:
        """Decorate `inner` like this object."""
