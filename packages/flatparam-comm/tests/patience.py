"""How long a test waits for something that comes at once on an idle machine: only a test that hangs waits so long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from flatparam_comm.testing import run_processes, run_threads

SCALE: Final = float(os.environ.get("FLATPARAM_TEST_PATIENCE", "1"))
PATIENCE: Final = 600.0 * SCALE
"""Seconds for a world of ranks; a collective in it has half, so that it is the collective that says so."""
BRIEFLY: Final = round(5 * SCALE)
"""Seconds for a collective that is meant to run out of time: enough for the ranks that are there already."""


def be_patient() -> None:
    """Let the worlds that tests start wait so long, where they do not say how long themselves."""
    run_threads.__kwdefaults__["timeout"] = PATIENCE
    run_processes.__kwdefaults__.update(timeout=PATIENCE, pg_timeout=PATIENCE / 2)


def longer_and_longer(first: float) -> Iterator[float]:
    """Time limits for what must be under way when its time is up, which takes a busy machine longer: each is twice the last."""
    limit = first
    while limit < PATIENCE / 4:
        yield limit
        limit *= 2
