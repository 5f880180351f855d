"""An exact account of the bytes that one rank moves, and the decorator that keeps it.

The bytes that a rank sends are those of the bandwidth-optimal algorithms, for n ranks and a full buffer of N bytes:

| op | bytes this rank sends | algorithm |
| --- | --- | --- |
| all_gather | N (n-1)/n | ring: n-1 times one shard |
| reduce_scatter | N (n-1)/n | ring: n-1 times one shard |
| all_reduce | 2 N (n-1)/n | reduce-scatter, then all-gather |
| all_to_all | what it gives the others | directly |
| broadcast | N, and 0 on the last rank after the root | pipelined chain: root, root+1, ... |

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009), theorem 1 for the all-reduce; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 4.1-4.5 for the
others. An engine may send more (gloo's own reduce-scatter is an all-reduce); the ledger counts the bytes that are
needed, so that plans can be compared on any engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import Collectives, Parts, Pending, TakesParts, takes_parts
from flatparam_comm.decorators.forwarding import ForwardingCollectives


@final
@attrs.frozen
class Transfer:
    """One collective, as seen by one rank.

    `payload_nbytes` is the size of the full buffer (the gather's output, the input of a reduction or an all-to-all),
    `sent_nbytes` is the
    number of bytes that this rank must send.
    """

    op: str
    label: str
    dtype: torch.dtype
    payload_nbytes: int
    sent_nbytes: int


@final
@attrs.frozen
class Totals:
    """The number of collectives, and the sums of their bytes."""

    count: int = 0
    payload_nbytes: int = 0
    sent_nbytes: int = 0

    def plus(self, transfer: Transfer) -> Totals:
        """Return these totals with one more transfer."""
        return Totals(
            self.count + 1, self.payload_nbytes + transfer.payload_nbytes, self.sent_nbytes + transfer.sent_nbytes
        )


@final
class ByteLedger:
    """Pass a ledger to `RecordingCollectives` (or to several of one rank), and read what was moved.

    Totals are kept by op and by label, so its memory grows with the number of distinct labels only. With `keep=True` it
    also keeps every transfer, in order, in `transfers`.
    """

    __slots__ = ("_by_label", "_by_op", "_keep", "_total", "_transfers")

    def __init__(self, *, keep: bool = False) -> None:
        """Begin with an empty ledger."""
        self._keep = keep
        self._total = Totals()
        self._by_op: dict[str, Totals] = {}
        self._by_label: dict[str, Totals] = {}
        self._transfers: list[Transfer] = []

    def __repr__(self) -> str:
        return f"ByteLedger({self._total.count} collectives, {self._total.sent_nbytes} bytes sent)"

    def record(self, transfer: Transfer) -> None:
        """Add one transfer."""
        self._total = self._total.plus(transfer)
        self._by_op[transfer.op] = self._by_op.get(transfer.op, Totals()).plus(transfer)
        self._by_label[transfer.label] = self._by_label.get(transfer.label, Totals()).plus(transfer)
        if self._keep:
            self._transfers.append(transfer)

    def reset(self) -> None:
        """Forget everything recorded so far."""
        self._total = Totals()
        self._by_op.clear()
        self._by_label.clear()
        self._transfers.clear()

    @property
    def total(self) -> Totals:
        """The totals of everything since the last reset."""
        return self._total

    @property
    def payload_nbytes(self) -> int:
        """The bytes of all full buffers since the last reset."""
        return self._total.payload_nbytes

    @property
    def sent_nbytes(self) -> int:
        """The bytes this rank had to send since the last reset."""
        return self._total.sent_nbytes

    def by_op(self) -> dict[str, Totals]:
        """Totals per collective (`"all_gather"`, ...), in the order of their first use."""
        return dict(self._by_op)

    def by_label(self) -> dict[str, Totals]:
        """Totals per caller's label, in the order of their first use."""
        return dict(self._by_label)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every transfer since the last reset, in order. Raises ValueError unless the ledger was made to keep them."""
        if not self._keep:
            raise ValueError("expected a ledger that keeps its transfers: make it with ByteLedger(keep=True)")
        return tuple(self._transfers)


def sent_nbytes(op: str, payload_nbytes: int, *, rank: int, size: int, root: int = 0) -> int:
    """Return the bytes that `rank` of `size` must send for a collective whose full buffer has `payload_nbytes`.

    `op` is `"all_gather"`, `"reduce_scatter"`, `"all_reduce"` or `"broadcast"`; see this module's table. A fraction of
    a byte (an all-reduce that n does not divide) is rounded up. Raises ValueError for any other `op`.
    """
    if op in ("all_gather", "reduce_scatter"):
        return _rounded_up(payload_nbytes * (size - 1), size)
    if op == "all_reduce":
        return _rounded_up(2 * payload_nbytes * (size - 1), size)
    if op == "broadcast":
        return 0 if (rank - root) % size == size - 1 else payload_nbytes
    raise ValueError(f"sent_nbytes: expected a data-plane collective, found {op!r}")


def _rounded_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


_FULL: Final = {"all_gather": 0, "reduce_scatter": 1, "all_reduce": 0, "broadcast": 0}
"""By collective, the place of the full buffer among its arguments."""


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

    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Do it, and record what of its tensors this rank sends."""
        done = super()._call(name, *args, **options)
        if name == "all_to_all":
            given: Tensor = args[1]
            sent = (given.numel() - options["given_numels"][self.rank]) * given.itemsize
            self.ledger.record(Transfer(name, options["label"], given.dtype, given.nbytes, sent))
        elif name in _FULL:
            self._record(name, options["label"], args[_FULL[name]], options.get("root", 0))
        return done

    @property
    def reduce_scatter_parts(self) -> Callable[..., Pending]:
        """Return the method of `inner`, recorded too; the attribute exists only if `inner` has it."""
        if not takes_parts(self.inner):
            raise AttributeError(f"{self.inner!r} takes no parts: it has no reduce_scatter_parts")
        return functools.partial(self._reduce_scatter_parts, self.inner)

    def _reduce_scatter_parts(self, inner: TakesParts, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        pending = inner.reduce_scatter_parts(output, full, label=label)
        self._record("reduce_scatter", label, full)
        return pending

    def _decorate(self, inner: Collectives) -> Collectives:
        return RecordingCollectives(inner, self.ledger)

    def _record(self, op: str, label: str, full: Tensor | Parts, root: int = 0) -> None:
        payload = full.numel() * full.dtype.itemsize
        sent = sent_nbytes(op, payload, rank=self.rank, size=self.size, root=root)
        self.ledger.record(Transfer(op, label, full.dtype, payload, sent))
