"""The world of threads that a thread is a rank of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from flatparam_comm.collectives import Collectives


class _Current(threading.local):
    collectives: Collectives | None = None


_CURRENT = _Current()


def current_collectives() -> Collectives | None:
    """Return the world of threads that the calling thread is a rank of, or None outside of `run_threads`."""
    return _CURRENT.collectives


@contextlib.contextmanager
def set_current_collectives(collectives: Collectives) -> Iterator[None]:
    """Inside, `current_collectives()` returns `collectives` in the calling thread."""
    before = _CURRENT.collectives
    _CURRENT.collectives = collectives
    try:
        yield
    finally:
        _CURRENT.collectives = before
