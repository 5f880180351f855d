"""The programs of the guides to single clients (docs/guides/client-*.md), as they are there; `nox -s clients` runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from integration_tests.clients.running import OURS, PROGRAMS, output_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

FSDP_YAML = Path(__file__).resolve().parent / "fsdp.yaml"
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", FSDP_YAML)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = {
    "accelerate": (ACCELERATE, "on_cpu.py"),
    "transformers": (TORCHRUN, "on_cpu.py"),
    "lightning": (TORCHRUN, "lightning_on_cpu.py"),
    "trl": (TORCHRUN, "on_cpu.py"),
    "peft": (TORCHRUN, "on_cpu.py"),
}


@pytest.mark.parametrize("client", LAUNCH)
def test_guide(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the guide trains, and resumed from its checkpoint it prints the same losses for the last steps."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not here; `nox -s clients` has it in an environment of its own")
    monkeypatch.chdir(tmp_path)
    launch, on_cpu = LAUNCH[client]
    program = (*launch, *OURS, PROGRAMS / on_cpu, PROGRAMS / f"guide_{client}.py")
    losses = losses_in(output_of(*program))
    assert len(losses) == 4
    assert losses_in(output_of(*program, "--resume"))[-2:] == losses[-2:]


def losses_in(output: str) -> list[list[str]]:
    """The lines that are two numbers."""
    lines = [line.split() for line in output.splitlines()]
    return [words for words in lines if len(words) == 2 and words[0].isdecimal()]
