"""Collectives that log the begin and the wait of each transfer, take (virtual) time, or fail on demand."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from flatparam_comm import Collectives, ForwardingCollectives, Pending, ReduceOp


@attrs.define(eq=False)
class Wire:
    """A log of transfers and computations, as ``(what, op, label)``, and a clock that both advance.

    Transfers go one after the other, each for ``seconds``; a wait moves the clock to the end of its transfer.
    """

    seconds: float = 0.0
    log: list[tuple[str, str, str]] = attrs.field(factory=list)
    clock: float = 0.0
    free_at: float = 0.0

    def begin(self, op: str, label: str) -> float:
        """Enter a transfer, and return when it will be over."""
        self.log.append(("begin", op, label))
        self.free_at = max(self.clock, self.free_at) + self.seconds
        return self.free_at

    def compute(self, name: str, seconds: float = 0.0) -> None:
        """Enter a computation."""
        self.log.append(("compute", "", name))
        self.clock += seconds

    def lines(self) -> list[str]:
        """The log as strings: ``"begin all_gather blocks.0"``, ``"compute forward blocks.0"``."""
        return [" ".join(part for part in entry if part) for entry in self.log]


@attrs.define(eq=False)
class TimedPending:
    """A pending that waits for the inner pending, and for the wire."""

    inner: Pending
    wire: Wire
    op: str
    label: str
    over_at: float
    waited: bool = False

    def wait(self) -> None:
        """Wait; enter it the first time."""
        if not self.waited:
            self.waited = True
            self.wire.log.append(("wait", self.op, self.label))
            self.wire.clock = max(self.wire.clock, self.over_at)
        self.inner.wait()

    def done(self) -> bool:
        """Whether the wire's clock has passed the end."""
        return self.wire.clock >= self.over_at and self.inner.done()


class WiredCollectives(ForwardingCollectives):
    """Collectives that send everything over a wire."""

    def __init__(self, inner: Collectives, wire: Wire) -> None:
        super().__init__(inner)
        self.wire = wire

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        return self._timed("all_gather", label, self.inner.all_gather(output, shard, label=label))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        pending = self.inner.reduce_scatter(output, full, op=op, label=label)
        return self._timed("reduce_scatter", label, pending)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        return self._timed("all_reduce", label, self.inner.all_reduce(tensor, op=op, label=label))

    def _timed(self, op: str, label: str, inner: Pending) -> Pending:
        return TimedPending(inner, self.wire, op, label, self.wire.begin(op, label))

    def _decorate(self, inner: Collectives) -> Collectives:
        return WiredCollectives(inner, self.wire)


class WireBroke(RuntimeError):
    """The exception that a broken wire raises."""


@attrs.define(eq=False)
class BreakingPending:
    """A pending that calls ``check`` at every wait, before the inner wait."""

    inner: Pending
    check: Callable[[], None]

    def wait(self) -> None:
        """Raise, or wait."""
        self.check()
        self.inner.wait()

    def done(self) -> bool:
        """Whether the inner one is done."""
        return self.inner.done()


class BreakingCollectives(ForwardingCollectives):
    """Every wait for transfer number ``nth`` (from 0) of ``op`` raises; with ``nth`` None none does."""

    def __init__(self, inner: Collectives, op: str) -> None:
        super().__init__(inner)
        self.op = op
        self.nth: int | None = None
        self.count = 0

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        return self._breaking("all_gather", self.inner.all_gather(output, shard, label=label))

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        return self._breaking("reduce_scatter", self.inner.reduce_scatter(output, full, op=op, label=label))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        return self._breaking("all_reduce", self.inner.all_reduce(tensor, op=op, label=label))

    def _breaking(self, op: str, inner: Pending) -> Pending:
        if op != self.op:
            return inner
        mine, self.count = self.count, self.count + 1

        def check() -> None:
            if mine == self.nth:
                raise WireBroke(f"{op} number {mine}")

        return BreakingPending(inner, check)

    def _decorate(self, inner: Collectives) -> Collectives:
        return self
