"""The promise of the command: at most the largest tensor and 64 MiB beyond what Python and torch take themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatparam_state import open_source

from .sparse import infos, sparse_run, sparse_safetensors

MIB = 1 << 20
ALLOWANCE = 64 * MIB
SHAPE = (2560, 4096)  # 40 MiB
LARGEST = 40 * MIB
COUNT = 52  # 2.03 GiB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, a checkpoint of ours of 2 GiB in holes, and what is made of it in all formats, in holes too."""
    path = tmp_path_factory.mktemp("large")
    sparse_run(path / "run", infos(COUNT, SHAPE), world_size=2)
    sparse_safetensors(path / "small.safetensors", infos(8, SHAPE))
    return path


# A process inherits the peak of the one that starts it; so a small one stands between.
LAUNCHER = """
import os, sys
out = os.open(os.devnull, os.O_WRONLY)
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def peak(*arguments: object) -> int:
    """The most resident memory of a process that runs `flatparam`, in bytes."""
    command = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, "-m", "flatparam", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    status, most = map(int, done.stdout.split())
    assert status == 0, arguments
    return most * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture(scope="module")
def baseline() -> int:
    """What the interpreter takes with torch and this package imported."""
    return peak("--version")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory(directory: Path, baseline: int) -> None:
    """Every command on gigabytes keeps the promise, and writes zeros as holes; measured as the kernel counts it."""
    assert sum(info.nbytes for info in open_source(directory / "run").tensors.values()) > 2 << 30
    run = directory / "run"
    commands = {
        "inspect": ("inspect", run),
        "verify": ("verify", run),
        "to torch": ("export", run, directory / "a.pt", "--to", "torch"),
        "to dcp": ("export", run, directory / "dcp", "--to", "dcp", "--world-size", 2),
        "to hf": (
            "export",
            run,
            directory / "hf",
            "--to",
            "hf",
            "--max-shard-size",
            "1GB",
            "--dtype",
            "bf16",
        ),
        "verify torch": ("verify", directory / "a.pt"),
        "diff": ("diff", directory / "a.pt", run),
        "from dcp": ("export", directory / "dcp", directory / "b.pt", "--to", "torch"),
        "import": ("import", directory / "small.safetensors", directory / "small"),
        "reshard": ("reshard", directory / "small", directory / "other", "--world-size", 3),
    }
    taken = {name: peak("ckpt", *arguments) - baseline for name, arguments in commands.items()}
    assert {name: nbytes // MIB for name, nbytes in taken.items() if nbytes > LARGEST + ALLOWANCE} == {}
    for name in ("a.pt", "b.pt"):
        assert (directory / name).stat().st_size > 2 << 30
        assert (directory / name).stat().st_blocks * 512 < 64 * MIB


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_scattered_tensor_of_torch(tmp_path: Path, baseline: int) -> None:
    """A large transposed tensor, which lies scattered in its file, is exported within the promise too."""
    torch.save({"w": torch.zeros(6000, 9000).t()}, tmp_path / "a.pt")
    taken = peak("ckpt", "export", tmp_path / "a.pt", tmp_path / "hf", "--to", "hf") - baseline
    assert taken <= ALLOWANCE
