"""The two pending values that need no engine: one that is over, and one that has something left to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import attrs

from flatparam_comm.collectives import Pending

__all__ = ["COMPLETED", "CompletedPending", "ContinuedPending"]


@final
@attrs.frozen
class CompletedPending:
    """Return this from a collective that is over when the call returns. Waiting does nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def done(self) -> bool:
        """True."""
        return True


COMPLETED: Final = CompletedPending()


@final
@attrs.define(eq=False)
class ContinuedPending:
    """Return this when `then` must run once, after `inner` is over and before the output may be read.

    `then` owns (closes over) whatever it needs; it is dropped as soon as it has run. It runs on the waiter's current
    stream, which `inner.wait()` has ordered after the collective.
    """

    inner: Pending
    then: Callable[[], None] | None

    def wait(self) -> None:
        """Wait for `inner`, then run `then` the first time. Raises what either of them raises."""
        self.inner.wait()
        if self.then is not None:
            self.then()
            self.then = None

    def done(self) -> bool:
        """Whether `inner` is done."""
        return self.inner.done()
