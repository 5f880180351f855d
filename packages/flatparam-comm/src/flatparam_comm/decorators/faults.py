"""Faults on demand, at a named collective: a rank that is slow, that fails or that dies."""

from __future__ import annotations

import fnmatch
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs

from flatparam_comm.collectives import Collectives
from flatparam_comm.decorators.forwarding import ForwardingCollectives


@final
@attrs.frozen
class Delay:
    """Make the rank call the collective this many seconds later."""

    seconds: float = attrs.field(validator=attrs.validators.ge(0))


@final
@attrs.frozen
class Raise:
    """Make the rank raise this instead of calling the collective."""

    exception: BaseException


@final
@attrs.frozen
class Kill:
    """Send this signal to the rank's own process instead of calling the collective. For worlds of processes only."""

    signal: signal.Signals = signal.SIGKILL


#: The action of a fault.
Action = Delay | Raise | Kill


@final
@attrs.frozen
class Fault:
    """Do `action` at one matching collective of each rank.

    `op` is a method's name (`"all_gather"`, ...), `label` a pattern of `fnmatch` for the caller's label, `rank` a rank
    of the outermost group; None matches any. On each rank, only the matching call number `nth` (from 0) is hit.
    """

    op: str | None = None
    label: str | None = None
    rank: int | None = None
    nth: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    action: Action = attrs.field(kw_only=True, validator=attrs.validators.instance_of((Delay, Raise, Kill)))

    def matches(self, rank: int, op: str, label: str) -> bool:
        """Return whether this matches the collective `op` with `label` on `rank` (whatever the call's number)."""
        return (
            self.op in (None, op)
            and self.rank in (None, rank)
            and (self.label is None or fnmatch.fnmatchcase(label, self.label))
        )


@final
class FaultyCollectives(ForwardingCollectives):
    """Wrap a rank's collectives in this to inject faults at the calls that they match; other calls go through.

    `sleep` spends a delay (in seconds). Subgroups continue the count: a fault's `rank` is that of the outermost group,
    and its `nth` counts the calls of a rank over all its groups.
    """

    __slots__ = ("_hits", "_outer_rank", "_sleep", "faults")

    def __init__(
        self, inner: Collectives, faults: Sequence[Fault], *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Count the calls of each fault from here on."""
        super().__init__(inner)
        self.faults = tuple(faults)
        self._hits = [0] * len(self.faults)
        self._outer_rank = inner.rank
        self._sleep = sleep

    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Let faults strike, then go on."""
        self._strike(name, options.get("label", ""))
        return super()._call(name, *args, **options)

    def _decorate(self, inner: Collectives) -> Collectives:
        made = FaultyCollectives(inner, self.faults, sleep=self._sleep)
        made._hits = self._hits
        made._outer_rank = self._outer_rank
        return made

    def _strike(self, op: str, label: str) -> None:
        """Do the actions of the faults that this call hits."""
        for index, fault in enumerate(self.faults):
            if fault.matches(self._outer_rank, op, label):
                self._hits[index] += 1
                if self._hits[index] == fault.nth + 1:
                    self._act(fault.action)

    def _act(self, action: Action) -> None:
        if isinstance(action, Delay):
            self._sleep(action.seconds)
        elif isinstance(action, Raise):
            raise action.exception
        else:
            os.kill(os.getpid(), action.signal)
