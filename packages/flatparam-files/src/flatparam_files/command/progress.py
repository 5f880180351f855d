"""Progress in bytes, on a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["showing"]


@contextmanager
def showing(chosen: argparse.Namespace, what: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar over `nbytes` on stderr, if that is a terminal; yields what is called with each part done."""
    if chosen.quiet or chosen.no_progress or not sys.stderr.isatty():
        yield lambda done: None
        return
    # Imported only if a bar is shown.
    from tqdm import tqdm

    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
        yield bar.update
