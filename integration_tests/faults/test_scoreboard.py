"""The tool that prints the table of faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration_tests.faults.scoreboard import main

pytestmark = [pytest.mark.processes, pytest.mark.long]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two faults on both transports are named; torch's FSDP1 is worse off in one, which does not change the exit code."""
    file = tmp_path / "told.json"
    assert main(["--faults", "is killed", "raises in forward, and lives", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "| raises in forward, and lives | named | named | waited |" in printed
    told = json.loads(file.read_text())
    assert len(told) == 2 * 3 * 2
    ours = [each for each in told if each["library"] != "torch FSDP1"]
    assert all("rank 1 failed first" in each["told"][0] for each in ours)
