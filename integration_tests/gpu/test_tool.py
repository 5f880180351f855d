"""`bash tools/gpu/offline.sh` from beginning to end without a GPU, and `python tools/gpu` on the simulated device."""

from __future__ import annotations

import gzip
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
from flatparam_simdev import build

pytestmark = pytest.mark.processes

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


def run(folder: Path, command: list[str], *arguments: str) -> Run:
    """Run the tool with tiny models, without limits that a busy machine could reach."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    changed = {"PYTHONPATH": path, "OUT": str(folder), "PYTHON": sys.executable, "SECONDS_IN_ALL": "6000"}
    ended = subprocess.run(
        [*command, "--tiny", *arguments, "--patience", str(PATIENCE / 10)],
        cwd=ROOT,
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
        check=False,
    )
    files = list(folder.glob("*.json"))
    assert len(files) == 1, ended.stdout + ended.stderr
    page = files[0].with_suffix(".md").read_text(encoding="utf-8")
    return Run(ended.returncode, ended.stdout, json.loads(files[0].read_text(encoding="utf-8")), page)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Everything, on the CPU, as on a machine without a package index."""
    folder = tmp_path_factory.mktemp("cpu")
    found = run(folder, ["bash", "tools/gpu/offline.sh"], "--device", "cpu")
    files = list(folder.iterdir())
    assert len(files) < 8
    (profile,) = (file for file in files if file.name.endswith("-profile.json.gz"))
    assert json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    return found


@pytest.mark.long
def test_everything_runs_on_the_cpu(on_cpu: Run) -> None:
    """Each measurement is entered: it has found something of everybody, or it says that it needs another device."""
    entries = on_cpu.results["measurements"]
    assert on_cpu.status == 0, on_cpu.said
    assert list(entries) == [each.name for each in MEASUREMENTS]
    elsewhere = {name for name, entry in entries.items() if "reason" in entry}
    assert elsewhere == {
        *("link, 2.0", "link, 0.5", "memory, expandable segments"),
        "capture",
    }
    for name in entries.keys() - elsewhere - {"tests"}:
        assert not [row for row in on_cpu.rows(name).values() if "error" in row], name
    assert "only CUDA sleeps in a stream" in entries["link, 1.0"]["note"]
    assert entries["tests"]["failed"] == 0
    assert all(f"## {name}\n" in on_cpu.page for name in entries)


@pytest.mark.long
def test_each_part_is_announced(on_cpu: Run) -> None:
    """There is a line for each part, with its number."""
    for number, measurement in enumerate(MEASUREMENTS, start=1):
        assert f"\n{number}/{len(MEASUREMENTS)} {measurement.name}: " in on_cpu.said


def is_formulas(run: Run, name: str, formula: str, part: str) -> bool:
    """Whether it is measured as the formula says, beside activations of a few rows."""
    found = run.rows("memory")[name][part]
    said = run.results["measurements"]["memory"]["formulas"][formula][part]
    return bool(said <= found <= 1.01 * said)


@pytest.mark.long
def test_losses_and_memory_on_the_cpu(tmp_path: Path) -> None:
    """Everybody has FSDP1's losses on two processes and on emulated ranks, and threads those of a model on the mean.

    One of eight ranks takes the memory that the formulas say.
    """
    chosen = ("--device", "cpu", "--only", "losses", "memory")
    found = run(tmp_path, ["bash", "tools/gpu/offline.sh"], *chosen)
    assert found.status == 0, found.said
    of_eight = [f"losses, eight ranks, {precision}" for precision in ("fp32", "bf16")]
    for name in ("losses", "losses, bf16", "losses, threads", *of_eight):
        assert all(row["equal"] for row in found.rows(name).values())
    of_processes, of_threads = (found.rows(name)["flatparam"]["losses"] for name in ("losses", "losses, threads"))
    assert of_processes == of_threads
    assert of_processes[0] > of_processes[-1]
    for part in ("rest", "forward", "backward"):
        for form in ("flatparam", "flatparam, original", "flatparam, fully_shard"):
            assert is_formulas(found, form, "FULL_SHARD", part)
        assert is_formulas(found, "flatparam, SHARD_GRAD_OP", "SHARD_GRAD_OP", part)


@pytest.fixture(scope="module")
def on_simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the simulated device can show, in a world of one process."""
    if reason := build.why_not():
        pytest.skip(reason)
    command = [sys.executable, "-W", "ignore", "tools/gpu", "--out"]
    register = ("--import", "integration_tests.gpu.simulated_device")
    chosen = ("--only", "backend", "losses", "memory", "link")
    folder = tmp_path_factory.mktemp("simulated")
    return run(folder, [*command, str(folder)], *register, *chosen)


@pytest.mark.long
def test_losses_are_the_same_on_an_accelerator(on_simulated: Run) -> None:
    """With streams the losses are FSDP1's too; the one rank shards through the device's backend all the same."""
    assert on_simulated.status == 0, on_simulated.said
    assert on_simulated.results["device"]["backend"] == "simulated"
    assert "flatparam, sharded over one rank" in on_simulated.rows("losses")
    for name in ("losses", "losses, bf16", "losses, eight ranks, fp32", "losses, eight ranks, bf16"):
        assert all(row["equal"] for row in on_simulated.rows(name).values())


@pytest.mark.long
def test_eight_ranks_are_emulated_on_an_accelerator(on_simulated: Run) -> None:
    """Everybody trains over emulated ranks with streams of their own; our products are right where the backend's are 0."""
    failed = {who for name in ("link, 1.0", "memory") for who, row in on_simulated.rows(name).items() if "error" in row}
    assert failed <= {"torch FSDP1, offload"}  # the device's tensors cannot take the place of others
    rows = on_simulated.rows("backend")
    # The simulated backend has NCCL's fault (pytorch#190745).
    faulty = {f"PREMUL_SUM by 0.25, {name}, bfloat16" for name in ("all-reduce", "reduce-scatter")}
    assert {name for name, row in rows.items() if not row["right"]} == faulty


@pytest.mark.long
@pytest.mark.parametrize("part", ["rest", "forward", "backward"])
def test_memory_on_an_accelerator_is_the_formulas(on_simulated: Run, part: str) -> None:
    """One unit's reduction is under way while the next is at work, and units are gathered ahead, as the formula says."""
    assert is_formulas(on_simulated, "flatparam", "FULL_SHARD", part)
    assert is_formulas(on_simulated, "flatparam, SHARD_GRAD_OP", "SHARD_GRAD_OP", part)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_no_accelerator(tmp_path: Path) -> None:
    """Without an accelerator nothing is measured and nothing written: it says how to try it on the CPU."""
    command = ["bash", "tools/gpu/offline.sh", "--patience", str(PATIENCE / 10)]
    changed = {"OUT": str(tmp_path), "PYTHON": sys.executable, "SECONDS_IN_ALL": "6000"}
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **changed}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "--device cpu" in ended.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["log.txt"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """A Python without the packages is refused before anything begins, with their names."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    changed = {"OUT": str(tmp_path / "out"), "PYTHON": str(bare)}
    ended = subprocess.run(
        ["bash", "tools/gpu/offline.sh"],
        cwd=ROOT,
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "lacks torch attrs tqdm" in ended.stderr
