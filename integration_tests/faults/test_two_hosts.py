"""Two hosts, each of two ranks, that a virtual cable joins: what becomes of training when the cable does."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.faults import two_hosts

_NEW_SPACES = ("unshare", "--user", "--map-root-user", "--net")
_TOOLS = ("unshare", "nsenter", "ip", "hostname")
_LAYS = """
from integration_tests.faults.cable import Cable
Cable(("cable0", "cable1")).lay()
"""


@functools.cache
def _permitted() -> bool:
    if not all(map(shutil.which, _TOOLS)):
        return False
    lays = [*_NEW_SPACES, "unshare", "--net", "--uts", sys.executable, "-c", _LAYS]
    return subprocess.run(lays, capture_output=True).returncode == 0


@functools.cache
def _outcome(fault: str) -> list[dict[str, Any]]:
    """What each rank said."""
    if not _permitted():
        pytest.skip("this system permits no namespaces or no /dev/net/tun, or lacks ip, unshare or nsenter")
    command = [*_NEW_SPACES, sys.executable, "-m", "integration_tests.faults.two_hosts", fault]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    said: list[dict[str, Any]] = found["said"]
    assert found["exits"] == [0] * 2, (found, ended.stderr)
    assert [each["rank"] for each in said] == [0, 1, 2, 3]
    assert all(each["shares"] for each in said)
    return said


def _trained(group: Collectives) -> dict[str, Any]:
    """What a rank says where all are on one host."""
    return two_hosts.train("none")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_cable_is_cut() -> None:
    """Every rank raises PeerError, which names a rank of the other host and says that it cannot be reached."""
    said = _outcome("cut")
    told = "\n".join(each["text"] for each in said)
    assert [each["kind"] for each in said] == ["PeerError"] * 4, told
    for each in said:
        assert "failed first" in each["text"], each
    assert "its host cannot be reached any more" in told, told


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("fault", ["slow", "lossy"])
def test_a_bad_cable(fault: str) -> None:
    """100 ms of delay, or 5 % of the packets lost, change no bit of any loss of one host."""
    said, expected = _outcome(fault), run_processes(4, _trained)
    assert [each["kind"] for each in [*said, *expected]] == [""] * 8, (said, expected)
    assert [each["losses"] for each in said] == [each["losses"] for each in expected]
    assert all(len(each["losses"]) == 12 for each in said)
