"""Programs of accelerate, transformers and TRL that use FSDP2, started by their launchers with `flatparam run` in front.

`nox -s clients` runs them, with torch's `fully_shard` and with flatparam's: the losses and norms are the same bits. More
programs, and what they resume, are in `cells.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from integration_tests.clients.running import OURS, PROGRAMS, Losses, losses_in, output_of

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip("it takes accelerate, transformers and PEFT", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

CASES = {
    "fsdp2_loop.py": ["", "--ram"],
    "fsdp2_trainer.py": ["--tied --checkpointing"],
    "trl_trainers.py": ["SHARDED_STATE_DICT sft --fsdp2 --lora --bf16"],
}
FSDP2_YAML = Path(__file__).resolve().parent / "fsdp2.yaml"


def run(program: str, folder: Path, options: str, *, ours: bool) -> Losses:
    """What the ranks print: two of them, started by torchrun."""
    runner = OURS if ours else ()
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *runner)
    output = output_of(*launch, PROGRAMS / "on_cpu.py", PROGRAMS / program, folder, *options.split())
    return losses_in(output, runner)


@pytest.mark.parametrize(("program", "options"), [(p, each) for p, all_of in CASES.items() for each in all_of])
def test_the_bits_of_fsdp2(program: str, options: str, tmp_path: Path) -> None:
    """Each loss, and each norm by which gradients are clipped, is that with torch's `fully_shard`."""
    pytest.importorskip({"trl_trainers.py": "trl"}.get(program, "peft"))
    theirs = run(program, tmp_path / "theirs", options, ours=False)
    assert len(theirs) == 8
    assert run(program, tmp_path / "ours", options, ours=True) == theirs


@pytest.mark.parametrize("ram", ["true", "false"])
def test_accelerate_launch(ram: str, tmp_path: Path) -> None:
    """With accelerate's launcher and its file of settings, `cpu_ram_efficient_loading` or not, the bits are FSDP2's."""
    found = {}
    for runner in ((), OURS):
        launch = ("-m", "accelerate.commands.launch", "--config_file", FSDP2_YAML)
        options = ("--fsdp_cpu_ram_efficient_loading", ram, *runner, PROGRAMS / "on_cpu.py")
        program = (PROGRAMS / "fsdp2_loop.py", tmp_path / str(len(runner)), "--launched")
        found[runner] = losses_in(output_of(*launch, *options, *program), runner)
    assert len(found[OURS]) == 8
    assert found[OURS] == found[()]
    # `flatparam run` in front of the launcher reaches the ranks that it starts.
    front = output_of(*OURS, *launch, "--fsdp_cpu_ram_efficient_loading", ram, *options[-1:], *program)
    assert losses_in(front, OURS) == found[OURS]
