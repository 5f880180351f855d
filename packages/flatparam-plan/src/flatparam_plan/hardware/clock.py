"""When the host of a real rank issues collectives, waits for them, and goes from stage to stage."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import attrs
from torch import Tensor

from flatparam_comm import (
    Collectives,
    ForwardingCollectives,
    Parts,
    Pending,
    ReduceOp,
    TakesParts,
    takes_parts,
)
from flatparam_plan.training import Trained

__all__ = ["Clock", "ClockedCollectives", "Lap"]


@final
class Lap(NamedTuple):
    """One act of the host: "stage", "issued" or "waited", from `begin` to `end` in seconds."""

    kind: str
    begin: float
    end: float


@final
@attrs.define(eq=False)
class Clock:
    """A watcher that notes when each stage begins, and when collectives are issued and waited for."""

    laps: list[Lap] = attrs.field(factory=list)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """See `Watcher.stage`."""
        now = time.perf_counter()
        self.laps.append(Lap("stage", now, now))
        yield

    def made(self, trained: Trained) -> None:
        """Nothing is noted of it."""

    def note(self, kind: str, begin: float) -> None:
        """Note what has begun then and ends now."""
        self.laps.append(Lap(kind, begin, time.perf_counter()))


@final
@attrs.frozen(eq=False)
class _Clocked:
    """A pending that notes its first wait."""

    inner: Pending
    clock: Clock
    waited: list[bool] = attrs.field(factory=list)

    def wait(self) -> None:
        """Wait, and note how long."""
        begin = time.perf_counter()
        self.inner.wait()
        if not self.waited:
            self.waited.append(True)
            self.clock.note("waited", begin)

    def done(self) -> bool:
        """Whether it is over."""
        return self.inner.done()


@final
class ClockedCollectives(ForwardingCollectives):
    """Collectives that tell a clock when they are issued and waited for."""

    __slots__ = ("clock",)

    def __init__(self, inner: Collectives, clock: Clock) -> None:
        """Tell `clock` of the calls to `inner`."""
        super().__init__(inner)
        self.clock = clock

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """See `Collectives.all_gather`."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.all_gather(output, shard, label=label))

    def reduce_scatter(
        self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = ""
    ) -> Pending:
        """See `Collectives.reduce_scatter`."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.reduce_scatter(output, full, op=op, label=label))

    @property
    def reduce_scatter_parts(self) -> Callable[..., Pending]:
        """See `TakesParts.reduce_scatter_parts`; it exists only if `inner` has it."""
        if not takes_parts(self.inner):
            raise AttributeError(f"{self.inner!r} takes no parts")
        return functools.partial(self._parts, self.inner)

    def _parts(self, inner: TakesParts, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        begin = time.perf_counter()
        return self._issued(begin, inner.reduce_scatter_parts(output, full, label=label))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """See `Collectives.all_reduce`."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.all_reduce(tensor, op=op, label=label))

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """See `Collectives.broadcast`."""
        begin = time.perf_counter()
        return self._issued(begin, self.inner.broadcast(tensor, root=root, label=label))

    def _issued(self, begin: float, pending: Pending) -> Pending:
        self.clock.note("issued", begin)
        return _Clocked(pending, self.clock)

    def _decorate(self, inner: Collectives) -> Collectives:
        return ClockedCollectives(inner, self.clock)
