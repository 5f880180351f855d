"""The bar over the bytes of what can take long: one style and one switch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SWITCH = "FLATPARAM_PROGRESS"
DELAY = 1.0
"""Seconds after which a bar is shown that nobody has asked for."""


@contextmanager
def progress_bar(
    what: str, total: int | None, shows: bool | None = None, *, unit: str = "B"
) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr; yields what is called with the number of each part that is done.

    Args:
        total: None shows a count alone.
        shows: by default it is shown after a second, if stderr is a terminal and `FLATPARAM_PROGRESS` is not 0.
        unit: what is counted.
    """
    is_asked = bool(shows)
    if shows is None:
        shows = os.environ.get(_SWITCH) != "0" and sys.stderr is not None and sys.stderr.isatty()
    if not shows:
        yield lambda done: None
        return
    # Imported only if a bar is shown.
    from tqdm import tqdm

    delay = 0 if is_asked else DELAY
    with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=is_asked, delay=delay) as bar:
        # What is known beforehand can be an estimate.
        yield lambda done: bar.update(done if total is None else min(done, total - bar.n))
