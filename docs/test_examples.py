"""The programs of `examples` run, on two ranks, and print what they are there to show."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import runpy
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_processes

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS = 2

#: What a program prints at its end, whatever ran before.
PRINTED = {
    "elastic": r"step 20: loss \d\.\d+",
    "ema": r"loss with the weights \d+\.\d+, with their averages \d+\.\d+",
    "from_ddp": r"model\.pt has [\d,]{6,} numbers",
    "from_fsdp1": r"fsdp1\.pt has (\d\d) parameters and the states of \1",
    "from_fsdp2": r"step 20: loss \d\.\d+",
    "logs": r"loss \d+\.\d+ after 20 steps; see runs/",
    "lora": r"adapter has 12 tensors, [\d,]{5,} bytes",
    "muon": r"rank 1 has stepped 80 whole matrices",
    "pretrain": r"step 20: loss \d\.\d+",
    "profile_steps": r"_pre_backward_hook +\d+ times, +[\d,]+ us",
}
#: Those that other tests run, and why: they need other packages, or ranks and another process.
ELSEWHERE = {"generator", "qlora"}

pytestmark = pytest.mark.processes


def program(world: Collectives, path: str, arguments: Sequence[str], folder: str, port: int) -> str:
    """Run a program as a rank that torchrun has started; return what it prints."""
    dist.destroy_process_group()
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": str(world.rank)}
    os.environ.update(where, RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.size))
    os.chdir(folder)
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run(name: str, folder: Path, *arguments: str, ranks: int = RANKS) -> list[str]:
    """Run an example in `folder`, and return what each rank prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = str(EXAMPLES / f"{name}.py")
    return run_processes(ranks, program, path, arguments, str(folder), port)


def losses_in(printed: str) -> list[float]:
    """The losses that a program prints of its steps."""
    return [float(found) for found in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """It prints what it is there to show, and its losses fall."""
    printed = "".join(run(name, tmp_path))
    assert re.search(PRINTED[name], printed), printed
    losses = losses_in(printed)
    assert not losses[1:] or losses[-1] < losses[0]


def test_pretraining_goes_on(tmp_path: Path) -> None:
    """On three ranks, from what two have saved; the loss falls on."""
    before = losses_in(run("pretrain", tmp_path, "--steps", "10")[0])
    after = run("pretrain", tmp_path, "--steps", "20", ranks=3)
    assert len(before) == len(losses_in(after[0])) == 1, "the second run began at step 10"
    assert losses_in(after[0]) < before


def test_a_generator_follows(tmp_path: Path) -> None:
    """It writes with the last version, which counts upwards."""
    command = [sys.executable, str(EXAMPLES / "generator.py"), "generate"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as generator:
        printed = run("generator", tmp_path)[0]
        written, _ = generator.communicate(timeout=PATIENCE)
    assert printed.count("published version") == 5
    assert written.splitlines()[-1] == "version 5: [0, 1, 2, 3, 4, 5, 6]"


def test_logs_are_files(tmp_path: Path) -> None:
    """There is a line for each step."""
    run("logs", tmp_path)
    assert len((tmp_path / "runs" / "logs.jsonl").read_text(encoding="utf-8").splitlines()) == 20


@pytest.mark.long
def test_an_elastic_job_is_restarted(tmp_path: Path) -> None:
    """A rank fails; torchrun starts all again, as the program's head says, and they go on."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*command, "--max-restarts", "3", str(EXAMPLES / "elastic.py"), "--fail-at", "12"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if "begin after" in line] == [
        "2 ranks begin after step 0",
        "2 ranks begin after step 10",
    ]


def test_the_script_for_slurm_starts_a_torchrun_on_each_host(tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands, torchrun is told the hosts, the ranks of each, and where they meet."""
    told = tmp_path / "told"
    for name, text in {
        "scontrol": "printf 'host-7\\nhost-8\\n'",
        "srun": f'printf "%s\\n" "$@" > {told}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(stat.S_IRWXU)
    slurm = {"JOB_ID": "123456", "JOB_NUM_NODES": "2", "GPUS_PER_NODE": "8", "CPUS_PER_TASK": "64"}
    slurm |= {"JOB_NODELIST": "host-[7-8]", "SUBMIT_DIR": str(tmp_path)}
    environment: dict[str, Any] = {f"SLURM_{name}": value for name, value in slurm.items()}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", str(EXAMPLES / "slurm.sh")], env={**environment, "PATH": path}, check=True)
    words = told.read_text(encoding="utf-8").split()
    after = dict(itertools.pairwise(words))
    assert words[0] == "torchrun"
    assert (after["--nnodes"], after["--nproc-per-node"]) == ("2", "8")
    assert after["--rdzv-endpoint"] == "host-7:23456"
    assert (EXAMPLES.parent / words[words.index("--steps") - 1]).exists()


def test_every_example_is_run_and_listed() -> None:
    """None is left out here, in their list or on the site, and each is short enough to be copied."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*PRINTED, *ELSEWHERE}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    of_site = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")]:
        assert f"({path.name})" in page
        assert f'--8<-- "examples/{path.name}"' in of_site
        assert len(path.read_text(encoding="utf-8").splitlines()) < 120, path.name
