"""The promise of the command: at most the largest tensor and 64 MiB beyond what Python and torch take themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from flatparam_files import open_source

from .sparse import infos, sparse_run, sparse_safetensors

MIB = 1 << 20
ALLOWANCE = 64 * MIB
SHAPE = (2560, 4096)  # 40 MiB
LARGEST = 40 * MIB

# It imports torch once, and runs each command in a fork of its own: there the kernel counts the peak anew.
SERVER = """
import json, os, sys
from flatparam_files.command import main
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(json.loads(line)))
    _, status, usage = os.wait4(child, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, flush=True)
"""


@attrs.frozen
class Server:
    """A process that runs commands and measures them."""

    process: subprocess.Popen[str]

    def peak(self, *arguments: object) -> int:
        """The most resident memory while `flatparam ckpt ...` runs, in bytes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(["ckpt", *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        status, most = map(int, self.process.stdout.readline().split())
        assert status == 0, arguments
        return most * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One for all tests."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield Server(process)


@pytest.fixture(scope="module")
def baseline(server: Server, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a command takes on a checkpoint of one number: Python, torch and this package."""
    path = tmp_path_factory.mktemp("small")
    torch.save({"w": torch.ones(1)}, path / "a.pt")
    return server.peak("export", path / "a.pt", path / "hf", "--to", "hf")


@pytest.mark.long
@pytest.mark.slow
def test_memory(tmp_path: Path, server: Server, baseline: int) -> None:
    """Every command keeps the promise on a checkpoint twice as large; measured as the kernel counts it."""
    run = tmp_path / "run"
    sparse_run(run, infos(6, SHAPE), world_size=2)
    assert sum(info.nbytes for info in open_source(run).tensors.values()) > 2 * (LARGEST + ALLOWANCE)
    commands = {
        "inspect": ("inspect", run),
        "verify": ("verify", run),
        "to torch": ("export", run, tmp_path / "a.pt", "--to", "torch"),
        "to dcp": ("export", run, tmp_path / "dcp", "--to", "dcp", "--world-size", 2),
        "to hf": ("export", run, tmp_path / "hf", "--to", "hf", "--max-shard-size", "90MB", "--dtype", "bf16"),
        "verify torch": ("verify", tmp_path / "a.pt"),
        "diff": ("diff", tmp_path / "a.pt", run),
        "from dcp": ("export", tmp_path / "dcp", tmp_path / "b.pt", "--to", "torch"),
        "import": ("import", tmp_path / "hf", tmp_path / "other"),
        "reshard": ("reshard", run, tmp_path / "more", "--world-size", 3),
    }  # fmt: skip
    taken = {name: server.peak(*arguments) - baseline for name, arguments in commands.items()}
    assert {name: nbytes // MIB for name, nbytes in taken.items() if nbytes > LARGEST + ALLOWANCE} == {}


@pytest.mark.slow
@pytest.mark.long
def test_gigabytes(tmp_path: Path, server: Server, baseline: int) -> None:
    """More than two gigabytes are inspected, and read and exported, within the promise; zeros are written as holes."""
    sparse_run(tmp_path / "run", infos(52, SHAPE), world_size=2)
    for arguments in (
        ("inspect", tmp_path / "run"),
        ("export", tmp_path / "run", tmp_path / "a.pt", "--to", "torch"),
    ):
        assert server.peak(*arguments) - baseline <= LARGEST + ALLOWANCE
    assert (tmp_path / "a.pt").stat().st_size > 2 << 30
    assert (tmp_path / "a.pt").stat().st_blocks * 512 < 64 * MIB


@pytest.mark.slow
def test_a_scattered_tensor_of_torch(tmp_path: Path, server: Server, baseline: int) -> None:
    """A transposed tensor of 153 MiB, which lies scattered in its file, is exported without being held."""
    torch.save({"w": torch.zeros(5000, 8000).t()}, tmp_path / "a.pt")
    assert server.peak("export", tmp_path / "a.pt", tmp_path / "hf", "--to", "hf") - baseline <= 100 * MIB


@pytest.mark.slow
def test_the_measure_sees_memory(tmp_path: Path, server: Server, baseline: int) -> None:
    """The peak of a command is not less than what it must hold, a few chunks; so the other tests can fail."""
    sparse_safetensors(tmp_path / "a.safetensors", infos(2, SHAPE))
    taken = server.peak("export", tmp_path / "a.safetensors", tmp_path / "a.pt", "--to", "torch") - baseline
    assert taken > 4 * MIB
