"""The decorator that records collectives in a ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from flatparam_comm.collectives import Collectives, Parts, Pending, ReduceOp, TakesParts, takes_parts
from flatparam_comm.decorators.forwarding import ForwardingCollectives
from flatparam_comm.decorators.ledger import ByteLedger, Transfer, sent_nbytes


@final
class RecordingCollectives(ForwardingCollectives):
    """Wrap collectives in this to record every data-plane call in `ledger`, once the engine has accepted it.

    It counts the bytes that pass *here*: around `CompressedCollectives` the caller's, inside it those that travel.
    Control-plane calls carry no tensors and are not recorded. Subgroups record in the same ledger.
    """

    __slots__ = ("ledger",)

    def __init__(self, inner: Collectives, ledger: ByteLedger) -> None:
        """Record the calls to `inner` in `ledger`."""
        super().__init__(inner)
        self.ledger = ledger

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather, and record the bytes of `output`."""
        pending = self.inner.all_gather(output, shard, label=label)
        self._record("all_gather", label, output)
        return pending

    def reduce_scatter(
        self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """Reduce and scatter, and record the bytes of `full`."""
        pending = self.inner.reduce_scatter(output, full, op=op, label=label)
        self._record("reduce_scatter", label, full)
        return pending

    @property
    def reduce_scatter_parts(self) -> Callable[..., Pending]:
        """Return the method of `inner`, recorded too; the attribute exists only if `inner` has it."""
        if not takes_parts(self.inner):
            raise AttributeError(f"{self.inner!r} takes no parts: it has no reduce_scatter_parts")
        return functools.partial(self._reduce_scatter_parts, self.inner)

    def _reduce_scatter_parts(
        self, inner: TakesParts, output: Tensor, full: Parts, *, label: str = ""
    ) -> Pending:
        pending = inner.reduce_scatter_parts(output, full, label=label)
        self._record("reduce_scatter", label, full)
        return pending

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce, and record the bytes of `tensor`."""
        pending = self.inner.all_reduce(tensor, op=op, label=label)
        self._record("all_reduce", label, tensor)
        return pending

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Broadcast, and record the bytes of `tensor` and the root."""
        pending = self.inner.broadcast(tensor, root=root, label=label)
        self._record("broadcast", label, tensor, root)
        return pending

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Give ranks their elements, and record what this rank gets."""
        pending = self.inner.all_to_all(
            output, given, output_numels=output_numels, given_numels=given_numels, label=label
        )
        sent = (given.numel() - given_numels[self.rank]) * given.itemsize
        self.ledger.record(Transfer("all_to_all", label, given.dtype, given.nbytes, sent))
        return pending

    def _decorate(self, inner: Collectives) -> Collectives:
        return RecordingCollectives(inner, self.ledger)

    def _record(self, op: str, label: str, full: Tensor | Parts, root: int = 0) -> None:
        payload = full.numel() * full.dtype.itemsize
        sent = sent_nbytes(op, payload, rank=self.rank, size=self.size, root=root)
        self.ledger.record(Transfer(op, label, full.dtype, payload, sent))
