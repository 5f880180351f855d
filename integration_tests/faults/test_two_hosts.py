"""Two hosts, each of two ranks, that a virtual cable joins: what becomes of training when the cable does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from integration_tests.faults.two_hosts import FAULTS, NETEM

_NEW_SPACES = ("unshare", "--user", "--map-root-user", "--net")
_TOOLS = ("unshare", "nsenter", "ip", "tc", "hostname")


def _permitted() -> bool:
    if not all(map(shutil.which, _TOOLS)):
        return False
    lays = "ip link add cable0 type veth peer name cable1 && unshare --net --uts true"
    return subprocess.run([*_NEW_SPACES, "sh", "-c", lays], capture_output=True).returncode == 0


def _outcome(fault: str) -> list[dict[str, Any]]:
    """What each rank said; skips the test if the system does not have the fault."""
    if not _permitted():
        pytest.skip("this system permits no namespaces of networks, or lacks ip, tc, unshare or nsenter")
    command = [*_NEW_SPACES, sys.executable, "-m", "integration_tests.faults.two_hosts", fault]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode == 77 and fault in NETEM:
        pytest.skip("this system's kernel has no netem, which makes a cable slow or lossy")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    said: list[dict[str, Any]] = found["said"]
    assert found["exits"] == [0] * 4, (found, ended.stderr)
    assert [each["rank"] for each in said] == [0, 1, 2, 3]
    return said


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cable(fault: str) -> None:
    """A slow or lossy cable changes no number; when it is cut, every rank names one of the other host."""
    said = _outcome(fault)
    assert all(each["shares"] for each in said)
    if fault == "cut":
        assert [each["kind"] for each in said] == ["PeerError"] * 4, said
        for each in said:
            assert "failed first" in each["text"], each
        return
    assert [each["kind"] for each in said] == [""] * 4, said
    # Every loss is that of the rank's own batch and of weights that all ranks share.
    assert all(len(each["losses"]) == len(said[0]["losses"]) for each in said)
