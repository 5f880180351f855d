"""`python tools/gpu` from beginning to end without a GPU: on the CPU, and on the simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from gpu.main import MEASUREMENTS

from flatparam_comm.testing import PATIENCE
from integration_tests.simulated import build

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]


@define
class Run:
    """What a run has left."""

    status: int
    said: str
    results: dict[str, Any]
    page: str

    def rows(self, name: str) -> dict[str, dict[str, Any]]:
        """What a measurement has found of each contender."""
        rows: dict[str, dict[str, Any]] = self.results["measurements"][name]["rows"]
        return rows


def run(folder: Path, *arguments: str) -> Run:
    """Run the tool with tiny models, without limits that a busy machine could reach."""
    command = [sys.executable, "-W", "ignore", "tools/gpu", "--tiny", "--out", str(folder), *arguments]
    patience = ["--patience", str(PATIENCE / 10)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [*command, *patience], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    files = list(folder.glob("*.json"))
    assert len(files) == 1, ended.stdout + ended.stderr
    page = files[0].with_suffix(".md").read_text(encoding="utf-8")
    return Run(ended.returncode, ended.stdout, json.loads(files[0].read_text(encoding="utf-8")), page)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Everything, on the CPU."""
    return run(tmp_path_factory.mktemp("cpu"), "--device", "cpu")


def test_everything_runs_on_the_cpu(on_cpu: Run) -> None:
    """Each measurement is entered: it has found something of everybody, or it says that it needs another device."""
    entries = on_cpu.results["measurements"]
    assert on_cpu.status == 0, on_cpu.said
    assert list(entries) == [each.name for each in MEASUREMENTS]
    elsewhere = {name for name, entry in entries.items() if "not on this device" in entry.get("reason", "")}
    assert elsewhere == {"steps, offload", "overlap", "capture"}
    for name in entries.keys() - elsewhere:
        rows = on_cpu.rows(name)
        assert {"flatparam", "flatparam, original"} <= rows.keys()
        assert not [row for row in rows.values() if "error" in row], name
    assert all(f"## {name}\n" in on_cpu.page for name in entries)


def test_each_part_is_announced(on_cpu: Run) -> None:
    """There is a line for each part, with its number."""
    lines = on_cpu.said.splitlines()[1:]
    for number, (measurement, line) in enumerate(zip(MEASUREMENTS, lines, strict=False), start=1):
        assert line.startswith(f"{number}/{len(MEASUREMENTS)} {measurement.name}: ")


def test_losses_are_the_same_on_the_cpu(on_cpu: Run) -> None:
    """Everybody has FSDP1's losses on two processes, and threads those of a model on the mean."""
    for name in ("losses", "losses, threads"):
        assert all(row["equal"] for row in on_cpu.rows(name).values())
    of_processes, of_threads = (
        on_cpu.rows(name)["flatparam"]["losses"] for name in ("losses", "losses, threads")
    )
    assert of_processes == of_threads
    assert of_processes[0] > of_processes[-1]


def is_formulas(run: Run, name: str, formula: str, part: str) -> bool:
    """Whether it is measured as the formula says, beside activations of a few rows."""
    found = run.rows("memory")[name][part]
    said = run.results["measurements"]["memory"]["formulas"][formula][part]
    return bool(said <= found <= 1.01 * said)


@pytest.mark.parametrize("part", ["rest", "forward", "backward"])
def test_memory_on_the_cpu_is_the_formulas(on_cpu: Run, part: str) -> None:
    """On two ranks flatparam takes what the formulas say."""
    assert is_formulas(on_cpu, "flatparam", "FULL_SHARD", part)
    assert is_formulas(on_cpu, "flatparam, original", "FULL_SHARD", part)
    assert is_formulas(on_cpu, "flatparam, SHARD_GRAD_OP", "SHARD_GRAD_OP", part)


@pytest.fixture(scope="module")
def on_simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the simulated device can show, in a world of one process."""
    if reason := build.why_not():
        pytest.skip(reason)
    register = ("--import", "integration_tests.gpu.simulated_device")
    return run(tmp_path_factory.mktemp("simulated"), *register, "--only", "losses", "overlap", "memory")


def test_losses_are_the_same_on_an_accelerator(on_simulated: Run) -> None:
    """With streams the losses are FSDP1's too; the one rank shards through the device's backend all the same."""
    assert on_simulated.status == 0, on_simulated.said
    assert on_simulated.results["device"]["backend"] == "simulated"
    rows = on_simulated.rows("losses")
    assert "flatparam, sharded over one rank" in rows
    assert all(row["equal"] for row in rows.values())


@pytest.mark.parametrize("part", ["rest", "forward", "backward"])
def test_memory_on_an_accelerator_is_the_formulas(on_simulated: Run, part: str) -> None:
    """One unit's reduction is under way while the next is at work, and units are gathered ahead, as the formula says."""
    name = "flatparam, sharded over one rank"
    assert is_formulas(on_simulated, name, "FULL_SHARD", part)
    assert is_formulas(on_simulated, f"{name}, SHARD_GRAD_OP", "SHARD_GRAD_OP", part)


def test_a_device_that_cannot_be_profiled(on_simulated: Run) -> None:
    """Where torch sees nothing of a device in a profile, each row says so instead of a figure."""
    for row in on_simulated.rows("overlap").values():
        assert row.keys() == {"error"}
    assert "events of the device" in on_simulated.rows("overlap")["flatparam"]["error"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_no_accelerator(tmp_path: Path) -> None:
    """Without an accelerator nothing is measured and nothing written: it says how to try it on the CPU."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "tools/gpu",
        "--out",
        str(tmp_path),
        "--patience",
        str(PATIENCE / 10),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--device cpu" in ended.stderr
    assert not list(tmp_path.iterdir())
