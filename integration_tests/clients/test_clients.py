"""Programs of accelerate, transformers and PEFT, unchanged, with `python -m flatparam run` in front; `nox -s clients` runs them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from integration_tests.clients.running import (
    OURS,
    PROGRAMS,
    Losses,
    after,
    assert_goes_on,
    losses_in,
    output_of,
)

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip(
        "accelerate, transformers and PEFT are not all here; `nox -s clients` has them in an environment of its own",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

FSDP_YAML = Path(__file__).resolve().parent / "fsdp.yaml"
FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def accelerate(
    *arguments: object,
    form: str = FORMS[0],
    run: tuple[str, ...] = OURS,
    ranks: int = 2,
    options: tuple[str, ...] = (),
) -> Losses:
    """What the loop prints, with accelerate's launcher and its file of settings."""
    launch = ("-m", "accelerate.commands.launch", "--config_file", FSDP_YAML)
    launch = (*launch, "--num_processes", str(ranks), *options)
    program = (PROGRAMS / "on_cpu.py", PROGRAMS / "loop.py")
    output = output_of(*launch, "--fsdp_state_dict_type", form, *run, *program, *arguments)
    return losses_in(output, run)


def trainer(*arguments: object, run: tuple[str, ...] = OURS, ranks: int = 2) -> Losses:
    """What the `Trainer` prints, with torchrun."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    output = output_of(*launch, *run, PROGRAMS / "on_cpu.py", PROGRAMS / "trainer.py", *arguments)
    return losses_in(output, run)


def test_unequal_work() -> None:
    """What accelerate has prepared takes micro-batches of any number and size on each rank: two ranks train as one does."""
    norms = []
    for ranks in (1, 2):
        launch = (
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            FSDP_YAML,
            "--num_processes",
            str(ranks),
        )
        output = output_of(*launch, *OURS, PROGRAMS / "on_cpu.py", PROGRAMS / "unequal.py")
        norms.append([float(line.split()[1]) for line in output.splitlines() if re.fullmatch(r"\d [\d.]+", line)])
    assert len(norms[0]) == 3
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_accelerate(form: str, tmp_path: Path) -> None:
    """Losses and norms with Adam are those with torch's FSDP1, and after a save and a resume those of the run that went on.

    A sharded state is loaded by accelerate into an optimizer without any: with torch's FSDP1, Adam starts anew.
    """
    losses = accelerate(tmp_path, "Adam", form=form)
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    assert accelerate(tmp_path, "Adam", "--resume=2", form=form) == after(2, losses)
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        theirs = accelerate(tmp_path / "theirs", "Adam", form=form, run=())
        assert losses == theirs
        assert accelerate(tmp_path / "theirs", "Adam", "--resume=2", form=form, run=()) != after(2, theirs)


@pytest.mark.parametrize("option", ["--bf16", "--accumulate", "--checkpointing", "--generate"])
def test_accelerate_with(option: str, tmp_path: Path) -> None:
    """The losses, and what is made of the full parameters, are those with torch's FSDP1; and the run can be resumed."""
    options = ("--fsdp_activation_checkpointing", "true") if option == "--checkpointing" else ()
    losses = accelerate(tmp_path, "SGD", option, options=options)
    assert len(losses) == 2 * (5 if option == "--generate" else 4)
    assert accelerate(tmp_path, "SGD", option, "--resume=2", options=options) == after(2, losses)
    theirs = accelerate(tmp_path / "theirs", "SGD", option, options=options, run=())
    for key, values in losses.items():
        # The norms by which both clip may differ in the last bits, as FSDP1 has parameters in a different order.
        assert values == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_accelerate_on_other_ranks(form: str, tmp_path: Path) -> None:
    """What two ranks saved is resumed by one, and what that one saved by three, each with the state of Adam."""
    losses = accelerate(tmp_path, "Adam", form=form)
    one = accelerate(tmp_path, "Adam", "--resume=2", form=form, ranks=1)
    assert_goes_on(one, losses, 2, ranks=1)
    three = accelerate(tmp_path, "Adam", "--resume=3", form=form, ranks=3)
    assert_goes_on(three, losses, 3, ranks=3)


@pytest.mark.parametrize(("form", "option"), [(FORMS[0], "--plain"), (FORMS[0], "--bf16"), (FORMS[1], "--plain")])
def test_trainer(form: str, option: str, tmp_path: Path) -> None:
    """The losses with AdamW are those with torch's FSDP1, and after a resume those of the run that went on."""
    losses = trainer(tmp_path, form, option)
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    # A resumed run has the log of the first steps, too.
    assert trainer(tmp_path, form, option, "--resume=2") == losses
    if form == FORMS[0]:
        assert losses == trainer(tmp_path / "theirs", form, option, run=())


@pytest.mark.parametrize("option", ["--accumulate", "--checkpointing", "--clip", "--generate"])
def test_trainer_with(option: str, tmp_path: Path) -> None:
    """The losses, and what is generated, are those with torch's FSDP1; and the resumed run is the one that went on."""
    losses = trainer(tmp_path, FORMS[0], option)
    assert len(losses) == 2 * (5 if option == "--generate" else 4)
    assert trainer(tmp_path, FORMS[0], option, "--resume=2") == losses
    theirs = trainer(tmp_path / "theirs", FORMS[0], option, run=())
    assert sorted(losses) == sorted(theirs)
    for key, values in losses.items():
        # Clipped gradients may differ in the last bits, as FSDP1 has parameters in a different order.
        assert values == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize("option", ["--plain", "--lora"])
@pytest.mark.parametrize("form", FORMS)
def test_trainer_on_other_ranks(form: str, option: str, tmp_path: Path) -> None:
    """What two ranks saved is resumed by one, and what that one saved by three, with the state of AdamW, on the same batches."""
    losses = trainer(tmp_path, form, option, "--batch=6")
    one = trainer(tmp_path, form, option, "--batch=12", "--resume=2", ranks=1)
    # A resumed run has the log of the first steps, too.
    assert_goes_on(one, losses, 0, ranks=1)
    three = trainer(tmp_path, form, option, "--batch=4", "--resume=3", ranks=3)
    assert_goes_on(three, losses, 0, ranks=3)


@pytest.mark.parametrize("form", FORMS)
def test_lora(form: str, tmp_path: Path) -> None:
    """Only the adapter is saved, and the resumed run is the one that went on; with torch's FSDP1 nothing is saved of it."""
    losses = trainer(tmp_path, form, "--lora")
    assert trainer(tmp_path, form, "--lora", "--resume=2") == losses
    assert {name.rpartition("lora_")[2] for name in saved_names(tmp_path)} == {"A.weight", "B.weight"}
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        assert losses == trainer(tmp_path / "theirs", form, "--lora", run=())
        assert saved_names(tmp_path / "theirs") == []


def saved_names(folder: Path) -> list[str]:
    """The names of what is in the checkpoint of the model."""
    import torch
    import torch.distributed.checkpoint as dcp

    saved = folder / "after-0" / "checkpoint-2"
    if (saved / "pytorch_model_fsdp.bin").exists():
        return list(torch.load(saved / "pytorch_model_fsdp.bin"))
    return list(dcp.FileSystemReader(saved / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata)
