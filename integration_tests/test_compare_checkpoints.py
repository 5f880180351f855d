"""`tools/compare_checkpoints.py`: what it finds of a tiny model that does not depend on the machine."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from checkpoint_costs.contenders import CONTENDERS, Training, shape_of
from checkpoint_costs.rounds import save_and_load
from gpt.model import GPT

from flatparam_comm import SingleCollectives
from flatparam_comm.testing import PATIENCE

TOOL = Path(__file__).resolve().parent.parent / "tools" / "compare_checkpoints.py"
PARAMETERS = 20_000
OURS = "flatparam Checkpointer"
BLOCK_NBYTES = 2**20
STATES = 3
"""A parameter and the two moments of AdamW."""

pytestmark = [pytest.mark.processes, pytest.mark.long]


@attrs.frozen
class Run:
    """What the tool has printed, its JSON, and where the checkpoints are."""

    output: str
    report: dict[str, Any]
    directory: Path

    @property
    def contenders(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["contenders"]
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One round of the tool."""
    directory = tmp_path_factory.mktemp("checkpoints")
    report = directory / "report.json"
    options = ["--parameters", PARAMETERS, "--rounds", 1, "--directory", directory, "--json", report]
    done = subprocess.run([sys.executable, TOOL, *map(str, options)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, json.loads(report.read_text()), directory)


def test_every_contender_is_right(run: Run) -> None:
    """Each loads what was saved, on two ranks and, but for the one file per rank, on three; none is left out."""
    assert list(run.contenders) == list(CONTENDERS)
    for name, figures in run.contenders.items():
        assert (figures["right"], figures["wrong"]) == (True, []), name
        if name == "torch FSDP1 sharded, torch.save":
            assert figures["resume"] is None
        else:
            assert (figures["resume"]["right"], figures["resume"]["wrong"]) == (True, []), name


def test_the_report_is_complete(run: Run) -> None:
    """Every contender has every figure, and a row in the table."""
    keys = {"parameters", "ranks", "rounds", "private_network", "torch", "contenders"}
    assert set(run.report) == keys
    assert run.report["parameters"] == sum(parameter.numel() for parameter in tiny().parameters())
    fields = ("returned_s", "done_s", "fsync_s", "peak", "wire", "ledger")
    expected = {f"{verb}_{field}" for verb in ("save", "load") for field in fields}
    for name, figures in run.contenders.items():
        assert set(figures) == expected | {"right", "wrong", "disk", "nbytes_read", "resume"}
        if figures["resume"] is not None:
            assert set(figures["resume"]) == {"right", "wrong", "read", "nbytes_read"}
        assert f"| {name} | yes |" in run.output


def test_sharded_saves_move_nothing(run: Run) -> None:
    """By the ledger ours send no byte, saving or loading; a full state sends half of itself from each of two ranks."""
    for name in (OURS, f"{OURS}, asynchronous", "flatparam sharded, DCP"):
        assert run.contenders[name]["save_ledger"] == run.contenders[name]["load_ledger"] == [0, 0]
    full = run.contenders["flatparam full, torch.save"]
    assert full["save_ledger"] == [STATES * 4 * run.report["parameters"] / 2] * 2
    assert full["load_ledger"] == [0, 0]


@pytest.mark.parametrize("name", [OURS, f"{OURS}, asynchronous"])
def test_a_rank_reads_what_it_needs(run: Run, name: str) -> None:
    """On the ranks of the save each reads its own file; on three, the pieces that its fragments touch, and headers."""
    directory = run.directory / name.replace(",", "").replace(" ", "-").lower() / "step-00000001"
    files = [directory / f"rank-{rank:05d}.safetensors" for rank in range(2)]
    figures = run.contenders[name]
    assert figures["nbytes_read"] == [file.stat().st_size for file in files]
    assert figures["resume"]["nbytes_read"] == [expected_nbytes(rank, 3, files) for rank in range(3)]


def test_a_wrong_contender_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads nothing, and one that cannot save, are named with what is wrong; the others go on."""

    def refuse(training: Training, path: Path) -> Any:
        raise OSError("no space")

    right = CONTENDERS[OURS]
    contenders = {
        "forgetful": attrs.evolve(right, load=lambda training, path: None),
        "failing": attrs.evolve(right, save=refuse),
        "right": right,
    }
    monkeypatch.setattr("checkpoint_costs.rounds.CONTENDERS", contenders)
    findings, _ = save_and_load(SingleCollectives(), PARAMETERS, 1, str(tmp_path))
    assert "values are not what was saved, first /0/" in findings["forgetful"].wrong
    assert findings["failing"].wrong == "OSError: no space"
    assert findings["right"].wrong == ""


def tiny() -> GPT:
    """The model that the tool trains."""
    return GPT(shape_of(PARAMETERS))


def units() -> Iterator[list[int]]:
    """The sizes of the parameters of each unit: the blocks, and what is outside of them."""
    model = tiny()
    inside = {parameter for block in model.blocks for parameter in block.parameters()}
    for block in model.blocks:
        yield [parameter.numel() for parameter in block.parameters()]
    yield [parameter.numel() for parameter in model.parameters() if parameter not in inside]


def fragments(sizes: list[int], rank: int, ranks: int) -> Iterator[range]:
    """Which elements of each parameter of a unit are in the shard of `rank`: an equal part of all, one after the other."""
    shard = -(-sum(sizes) // ranks)
    start = -rank * shard
    for size in sizes:
        yield range(max(0, -start), max(0, -start, min(size, shard - start)))
        start += size


def expected_nbytes(rank: int, ranks: int, files: list[Path]) -> int:
    """What `rank` of `ranks` reads of these files: each smaller than a block, so that pieces are read whole."""
    nbytes = 0
    touched = set()
    for sizes in units():
        for writer, file in enumerate(files):
            for piece, wanted in zip(fragments(sizes, writer, len(files)), fragments(sizes, rank, ranks), strict=True):
                assert len(piece) * 4 < BLOCK_NBYTES
                if max(piece.start, wanted.start) < min(piece.stop, wanted.stop):
                    nbytes += STATES * 4 * len(piece)
                    touched.add(file)
    return nbytes + sum(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in touched)
