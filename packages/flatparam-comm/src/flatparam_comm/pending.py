"""The pendings that need no engine: of what is complete when a call returns, and with a step left to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import Pending


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

    def wait(self) -> None:
        """Wait for `inner`, then run `then` the first time. Raises the error of either."""
        self.inner.wait()
        if self.then is not None:
            self.then()
            self.then = None

    def done(self) -> bool:
        """Return whether `inner` is done."""
        return self.inner.done()
