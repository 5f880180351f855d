"""Programs of accelerate and transformers, unchanged, with `python -m flatparam run` in front; `nox -s clients` runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatparam_comm.testing import PATIENCE

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers")):
    pytest.skip(
        "accelerate and transformers are not installed here; `nox -s clients` has them in an environment of its own",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
OURS = ("-m", "flatparam", "run")
FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")

Losses = dict[tuple[int, int], tuple[float, ...]]
"""By rank and step."""


def output_of(*arguments: object) -> str:
    """What two ranks print; they end well."""
    quiet = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **quiet},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def losses_in(output: str, module: str) -> Losses:
    """The losses that the ranks print; the class of their models is one of `module`."""
    lines = [line.split() for line in output.splitlines()]
    assert [words[1].split(".")[0] for words in lines if words[0] == "class"] == [module] * 2
    return {
        (int(words[1]), int(words[2])): tuple(map(float, words[3:])) for words in lines if words[0] == "loss"
    }


def accelerate(*arguments: object, form: str = FORMS[0], run: tuple[str, ...] = OURS) -> Losses:
    """What the loop prints, with accelerate's launcher and its file of settings."""
    launch = ("-m", "accelerate.commands.launch", "--config_file", HERE / "fsdp.yaml")
    program = (PROGRAMS / "on_cpu.py", PROGRAMS / "loop.py")
    output = output_of(*launch, "--fsdp_state_dict_type", form, *run, *program, *arguments)
    return losses_in(output, "flatparam" if run else "torch")


def trainer(*arguments: object, run: tuple[str, ...] = OURS) -> Losses:
    """What the `Trainer` prints, with torchrun."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = output_of(*launch, *run, PROGRAMS / "on_cpu.py", PROGRAMS / "trainer.py", *arguments)
    return losses_in(output, "flatparam" if run else "torch")


def after_two(losses: Losses) -> Losses:
    return {key: value for key, value in losses.items() if key[1] >= 2}


@pytest.mark.parametrize(("form", "optimizer"), [(FORMS[0], "SGD"), (FORMS[1], "Adam")])
def test_accelerate(form: str, optimizer: str, tmp_path: Path) -> None:
    """Losses and norms are those with torch's FSDP1, and after a save and a resume those of the run that went on.

    A sharded state is loaded by accelerate into an optimizer without any, so that Adam starts anew, with either library.
    """
    losses = accelerate(tmp_path, optimizer, form=form)
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    resumed = accelerate(tmp_path, optimizer, "--resume", form=form)
    assert resumed == after_two(losses)
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        assert losses == accelerate(tmp_path / "theirs", optimizer, form=form, run=())


def test_trainer_with_full_states(tmp_path: Path) -> None:
    """The losses after a save and a resume are those of the run that went on, with Adam's state."""
    losses = trainer(tmp_path, FORMS[1])
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    # A resumed run has the log of the first steps, too.
    assert trainer(tmp_path, FORMS[1], "--resume") == losses


def test_trainer_with_sharded_states(tmp_path: Path) -> None:
    """The losses are those with torch's FSDP1; after a resume the first one is, too (then Adam has started anew)."""
    losses = trainer(tmp_path, FORMS[0])
    assert losses == trainer(tmp_path / "theirs", FORMS[0], run=())
    resumed = trainer(tmp_path, FORMS[0], "--resume")
    assert [resumed[rank, 2] for rank in range(2)] == [losses[rank, 2] for rank in range(2)]
