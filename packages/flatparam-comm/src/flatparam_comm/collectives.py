"""The seam of this package: the protocol of a group of ranks.

Higher layers use `Collectives` and `Pending` only. Engines (process groups, a world of threads, a world of one) and
decorators (recording, silent, hooked, compressed, faulty) are interchangeable behind these protocols, and one contract
test suite runs over all of them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeGuard, final, runtime_checkable

import attrs
import torch
from torch import Tensor


class ReduceOp(enum.Enum):
    """The reduction of several ranks' values to one. There is no mean: divide before or after a SUM."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"

    # That of `Enum` is a function in Python, and an operation is looked up in each call.
    __hash__ = object.__hash__


@runtime_checkable
class Pending(Protocol):
    """Wait on this before you read the output or write to the input of the collective that returned it.

    It owns the tensors that must stay alive until the collective is done, so the caller may drop the arguments. If the
    caller drops the pending itself without waiting, the output is undefined.
    """

    def wait(self) -> None:
        """Make the output readable from here on; a second call costs nothing.

        CPU tensors: blocks until the bytes are there. CUDA tensors: orders the *current stream* after the collective
        and does not block the host. Raises the collective's error (`CollectiveError`), at each call.
        """

    def done(self) -> bool:
        """Return whether `wait` would return (or raise) without blocking the host."""


@runtime_checkable
class ExchangesValues(Protocol):
    """Ranks that tell each other small values, which is all that a save needs: `Collectives`, or `Survivors`."""

    @property
    def rank(self) -> int:
        """This rank's number within the group, `0 <= rank < size`."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return every rank's picklable `value`, in rank order. Use it for small facts: it blocks and pickles."""

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank has called it."""


@runtime_checkable
class Collectives(ExchangesValues, Protocol):
    """A group of ranks that move bytes between each other.

    Every rank of the group makes the same calls in the same order. Data-plane calls (`all_gather`, `reduce_scatter`,
    `all_reduce`, `broadcast`, `all_to_all`) are asynchronous and return a `Pending`; control-plane calls (`exchange`,
    `barrier`, `subgroup`) return when every rank has made them. `label` names the call in errors, ledgers and fault
    plans and is not compared between ranks. Invalid arguments raise `ValueError` at once, with the same text in every
    engine.
    """

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Fill `output` with every rank's `shard`, in rank order.

        Both are 1-D, contiguous, of one dtype (any) and on one device; `output.numel() == size * shard.numel()`.
        `shard` may be exactly this rank's slice of `output`; any other overlap is refused.
        """

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Fill `output` with this rank's slice of the reduction of every rank's `full`.

        Both are 1-D, contiguous, of one dtype (see `checks.REDUCIBLE`) and on one device; `full.numel() == size *
        output.numel()`. `output` may be exactly this rank's slice of `full`; any other overlap is refused. `full` is
        left as it is, except for that slice.
        """

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Replace `tensor` (contiguous, any shape) by the reduction of every rank's."""

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Replace `tensor` (contiguous, any shape, any dtype) by that of rank `root` *of this group*."""

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Fill `output` with what every rank gives this one, in rank order: each rank gives others different elements.

        Both are 1-D, contiguous, of one dtype (any), on one device and share no memory.

        Args:
            output: it has the elements of rank 0 first, `output_numels[0]` of them.
            given: the elements for rank 0 come first, `given_numels[0]` of them; it is left as it is.
            output_numels: for each rank, the elements that it gives this rank; they add up to `output.numel()`.
            given_numels: for each rank, the elements that this rank gives it; they add up to `given.numel()`.
            label: names the call in errors, ledgers and fault plans.
        """

    def subgroup(self, ranks: Sequence[int]) -> Collectives | None:
        """A group of only these ranks (numbers within this group, increasing), or None if this rank is not one of them.

        Every rank of this group calls `subgroup`, with the same `ranks`.
        """


class Parts(Protocol):
    """A 1-D flat tensor that lies in parts and has no buffer of its own; `flatparam_core.Unflattened` is one."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat tensor."""

    @property
    def device(self) -> torch.device:
        """The device that the parts are on."""

    def numel(self) -> int:
        """Return the number of elements of the flat tensor."""

    def fill(self, start: int, out: Tensor) -> None:
        """Write the elements `[start, start + out.numel())` to `out`, 1-D and contiguous."""


class TakesParts(Protocol):
    """An extra method of some `Collectives`: a reduce-scatter that reads each element from where it is."""

    def reduce_scatter_parts(self, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        """`Collectives.reduce_scatter` of a flat CPU tensor that lies in parts; a sum.

        Some ranks may call this and others `reduce_scatter`. The caller may write to the parts, and free them, when the
        call returns. `output` is new memory.
        """


def takes_parts(collectives: Collectives) -> TypeGuard[TakesParts]:
    """Return whether `collectives` can reduce-scatter a tensor that lies in parts."""
    return hasattr(collectives, "reduce_scatter_parts")


@final
@attrs.frozen
class CompletedPending:
    """Return this from a collective that is complete when the call returns. Waiting does nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def done(self) -> bool:
        """Always True."""
        return True


COMPLETED: Final = CompletedPending()


def let_end(pendings: Iterable[Any]) -> None:
    """Wait, after an interrupt or an error, for what moves bytes while nobody waits: its memory may be freed next."""
    for each in pendings:
        if getattr(each, "moves_by_itself", False):
            with contextlib.suppress(RuntimeError):
                each.wait()


def copied(target: Tensor, source: Tensor) -> Pending:
    """Copy `source` to `target` on this rank alone, unless they begin at one address; that completes the collective."""
    if target.data_ptr() != source.data_ptr():
        with torch.no_grad():
            target.copy_(source)
    return COMPLETED


@final
@attrs.define(eq=False)
class ContinuedPending:
    """Return this if `then` must run once, after `inner` is complete and before the output may be read.

    `then` owns (closes over) whatever it needs; it is dropped as soon as it has run. It runs on the waiter's current
    stream, which `inner.wait()` has ordered after the collective.
    """

    inner: Pending
    then: Callable[[], None] | None

    @property
    def moves_by_itself(self) -> bool:
        """Ask `inner` whether it moves bytes while nobody waits."""
        return getattr(self.inner, "moves_by_itself", False)

    def wait(self) -> None:
        """Wait for `inner`, then run `then` the first time. Raises the error of either."""
        self.inner.wait()
        if self.then is not None:
            self.then()
            self.then = None

    def done(self) -> bool:
        """Return whether `inner` is done."""
        return self.inner.done()
