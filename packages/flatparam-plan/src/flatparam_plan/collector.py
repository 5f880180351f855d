"""Python's collector of cycles, out of the way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["with_little_to_collect"]


@contextmanager
def with_little_to_collect() -> Iterator[Callable[[], None]]:
    """Inside, the collector of cycles looks at new objects alone; what is given is called to count all as old."""
    if gc.get_freeze_count():
        # Somebody else has frozen objects, which are not ours to thaw.
        yield lambda: None
        return
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()
