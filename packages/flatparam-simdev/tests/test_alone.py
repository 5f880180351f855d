"""The device needs torch alone: no other package of ours, and nobody is given a device by the import of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flatparam_simdev
from flatparam_comm.testing import PATIENCE
from flatparam_simdev import why_not

pytestmark = pytest.mark.processes

NO_OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
for name in ("flatparam", "flatparam_comm", "flatparam_core", "pytest"):
    sys.modules[name] = None
"""
RACE = """
import torch
from flatparam_simdev import find_races, replay, Costs
assert not hasattr(torch, "simulated")
from flatparam_simdev import device
device.start_log()
numbers = torch.ones(4, device=device.DEVICE)
with torch.Stream(device=device.DEVICE):
    numbers.mul_(2)
log = device.stop_log()
print(*find_races(log), sep="\\n")
assert replay(log, Costs()).tasks
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """What a Python comes to that finds no other package of ours."""
    source = str(Path(flatparam_simdev.__file__).parents[1])
    command = [sys.executable, "-c", NO_OTHER + program, source]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_race_is_found_without_other_packages() -> None:
    """The device, the checker and the replay import torch and attrs, and no package of flatparam."""
    if reason := why_not():
        pytest.skip(reason)
    ended = run(RACE)
    assert ended.returncode == 0, ended.stderr
    assert "race over device memory" in ended.stdout


def test_worlds_say_what_they_need() -> None:
    """Worlds of processes are collectives of flatparam-comm, and say how to install it."""
    ended = run("import flatparam_simdev.worlds")
    assert ended.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: flatparam_simdev.worlds: expected flatparam-comm, which is not installed: "
        "pip install flatparam-simdev[worlds]"
    )
