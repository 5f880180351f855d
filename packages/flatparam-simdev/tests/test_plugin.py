"""The plugin of pytest: tests that know nothing of the device run on it, and fail where there is a race."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flatparam_comm.testing import PATIENCE
from flatparam_simdev import why_not

pytestmark = pytest.mark.processes

TESTS = """
import torch

MADE_BY_THE_MODULE = torch.ones(2)

def doubled(numbers, wait):
    side = torch.Stream()
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        twice = numbers * 2
    torch.accelerator.current_stream().wait_stream(side)
    return twice

def test_ordered():
    assert doubled(torch.ones(2), wait=True).tolist() == [2.0, 2.0]

def test_hasty():
    assert doubled(torch.ones(2), wait=False).tolist() == [2.0, 2.0]

def test_of_the_module():
    assert MADE_BY_THE_MODULE.device.type == torch.ones(1).device.type == "simulated"
"""


def test_whole_files_of_tests(tmp_path: Path) -> None:
    """What a module and its tests make is on the device; the test with a race is an error that has the finding."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "flatparam_simdev.plugin",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "3 passed, 1 error" in ended.stdout, ended.stdout + ended.stderr
    assert "ERROR test_it.py::test_hasty" in ended.stdout
    assert "race over device memory: aten::mul" in ended.stdout
