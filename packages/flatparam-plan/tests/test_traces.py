"""The trace of a plan beside that of a run, and a plan inside of a program that is traced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatparam import plan
from flatparam.command import main
from flatparam_comm import run_threads
from flatparam_comm.testing import PATIENCE

from .traced import make, record


@pytest.mark.filterwarnings("ignore")
def test_a_plan_has_the_collectives_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`flatparam trace diff` finds no collective that the one has more often than the other."""
    run_threads(2, record, str(tmp_path))
    planned = plan(make, torch.ones(2, 8), world_size=2, wrap=("Block",), profile="h100").prediction
    assert planned is not None
    twin = tmp_path / "plan.json"
    twin.write_text(planned.picture("json"))
    main(["trace", "diff", str(tmp_path / "rank0.json"), str(twin)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "all_gather" in line]
    assert lines
    for line in lines:
        assert "beside" not in line or "wait" in line, line


PROGRAM = """
import sys
import torch
import flatparam

def train(world):
    wrapped = flatparam.FullyShardedDataParallel(torch.nn.Linear(4, 4), process_group=world, sync_module_states=True)
    wrapped(torch.ones(2, 4)).sum().backward()
    flatparam.plan(torch.nn.Linear(4, 4), torch.ones(2, 4), world_size=2) if world.rank == 0 else None
    world.barrier()

from flatparam_comm import run_threads
run_threads(2, train)
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_plan_is_not_traced(tmp_path: Path) -> None:
    """What a program plans leaves nothing in its traces, which have its one step."""
    script, folder = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "FLATPARAM_TRACE": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == ["rank0.json", "rank1.json"]
    counts = [text.count('"all_gather (root)"') for text in texts.values()]
    assert counts[0] == counts[1] > 0
