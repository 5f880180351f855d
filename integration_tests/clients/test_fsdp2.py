"""Programs of accelerate, transformers, TRL and Lightning that use FSDP2, unchanged, with `python -m flatparam run` in front.

`nox -s clients` runs them, with torch's `fully_shard` and with flatparam's: the losses and norms are the same bits.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from integration_tests.clients.running import OURS, PROGRAMS, Losses, after, losses_in, output_of

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip("it takes accelerate, transformers and PEFT", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

CASES = {
    "fsdp2_loop.py": [
        "",
        "--bf16",
        "--accumulate",
        "--checkpointing",
        "--tied",
        "--ram",
        "--ram --tied --bf16",
    ],
    "fsdp2_trainer.py": ["", "--bf16 --accumulate", "--tied --checkpointing", "--full", "--lora"],
    "fsdp2_lightning.py": [""],
    "trl_trainers.py": [
        f"SHARDED_STATE_DICT {kind} --fsdp2" for kind in ("sft", "dpo", "sft --lora --bf16", "reward --clip")
    ],
}
RESUMED = [("fsdp2_loop.py", ""), ("fsdp2_trainer.py", ""), ("fsdp2_trainer.py", "--full")]


def run(program: str, folder: Path, options: str, *, ours: bool) -> Losses:
    """What the ranks print: two of them, started by torchrun."""
    runner = OURS if ours else ()
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *runner)
    output = output_of(*launch, PROGRAMS / "on_cpu.py", PROGRAMS / program, folder, *options.split())
    return losses_in(output, runner)


@pytest.mark.parametrize(
    ("program", "options"), [(p, each) for p, all_of in CASES.items() for each in all_of]
)
def test_the_bits_of_fsdp2(program: str, options: str, tmp_path: Path) -> None:
    """Each loss, and each norm by which gradients are clipped, is that with torch's `fully_shard`."""
    pytest.importorskip({"trl_trainers.py": "trl", "fsdp2_lightning.py": "lightning"}.get(program, "peft"))
    theirs = run(program, tmp_path / "theirs", options, ours=False)
    assert len(theirs) == 8
    assert run(program, tmp_path / "ours", options, ours=True) == theirs


@pytest.mark.parametrize(("program", "options"), RESUMED)
@pytest.mark.parametrize("saved_by_us", [False, True], ids=["theirs", "ours"])
def test_each_resumes_what_the_other_has_saved(
    program: str, options: str, saved_by_us: bool, tmp_path: Path
) -> None:
    """A run that goes on from the second step in the other library has the losses of the run that was not interrupted."""
    whole = run(program, tmp_path / "saved", options, ours=saved_by_us)
    for ours in (False, True):
        folder = tmp_path / f"resumed-{ours}"
        shutil.copytree(tmp_path / "saved", folder)
        assert run(program, folder, f"{options} --resume=2", ours=ours) == after(2, whole)
