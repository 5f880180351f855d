"""How long a test waits for something that comes at once on an idle machine: only a test that hangs waits so long."""

from __future__ import annotations

import os
from typing import Final

from flatparam_comm.testing import run_processes, run_threads

PATIENCE: Final = 600.0 * float(os.environ.get("FLATPARAM_TEST_PATIENCE", "1"))
"""Seconds for a world of ranks or a program; a collective in it has half, so that it is the collective that says so."""


def be_patient() -> None:
    """Let the worlds that tests start wait so long, where they do not say how long themselves."""
    run_threads.__kwdefaults__["timeout"] = PATIENCE
    run_processes.__kwdefaults__.update(timeout=PATIENCE, pg_timeout=PATIENCE / 2)
