"""The rows of the load table, each for a moment; `nox -s run -- load` runs them at length."""

from __future__ import annotations

import pytest

from integration_tests.load.faults import soak_with_faults
from integration_tests.load.rows import BRIEF

pytestmark = pytest.mark.processes


SHORT = ("L3", "L4", "guards")


@pytest.mark.parametrize("row", [row if row in SHORT else pytest.param(row, marks=pytest.mark.long) for row in BRIEF])
def test_a_row(row: str) -> None:
    """A row's bounds hold, and it has figures."""
    assert BRIEF[row]()


@pytest.mark.long
def test_a_job_with_faults() -> None:
    """A job that is disturbed again and again is restarted, and its losses are those of one that is not."""
    figures = soak_with_faults(minutes=0.2, every=1.0)
    assert figures["silent"] == "0"
