"""Whole files of tests pass on the simulated device, too: here a few of each layer, and by `nox -s sanitise` all of them.

About 25 seconds on a quiet machine, and ten more to see that the table of those without a twin is right.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from flatparam_comm.testing import PATIENCE
from flatparam_simdev import build
from integration_tests.simulated.not_twinned import NOT_TWINNED, stands_for

pytestmark = pytest.mark.processes

ROOT: Final = Path(__file__).resolve().parents[2]
A_FEW: Final = (
    "packages/flatparam-comm/tests/test_broadcast.py",
    "packages/flatparam-runtime/tests/test_copying.py",
    "packages/flatparam-runtime/tests/test_unit.py",
    "packages/flatparam/tests/test_training.py",
    "integration_tests/lifted/test_ties.py",
)


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a pytest of its own came to, as the device belongs to a process for good."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.long
def test_contracts_hold_on_the_device() -> None:
    """What a unit, a copy, a tied parameter and a trained model do on the CPU they do there; and nothing races."""
    if reason := build.why_not():
        pytest.skip(reason)
    outcome = run_pytest("-p", "integration_tests.simulated.plugin", "-rfE", *A_FEW)
    assert outcome.returncode == 0, outcome.stdout[-5000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout


@pytest.mark.long
def test_each_test_without_a_twin_is_there() -> None:
    """Each name in the table stands for a test that pytest finds."""
    outcome = run_pytest("--collect-only", *sorted({name.partition("::")[0] for name in NOT_TWINNED}))
    assert outcome.returncode == 0, outcome.stdout[-5000:] + outcome.stderr[-2000:]
    found = outcome.stdout.splitlines()
    lost = [name for name in NOT_TWINNED if not any(stands_for(name, node_id) for node_id in found)]
    assert lost == []
