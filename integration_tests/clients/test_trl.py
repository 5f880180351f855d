"""Programs of TRL, unchanged, with `python -m flatparam run` in front; `nox -s clients` runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from integration_tests.clients.running import OURS, PROGRAMS, Losses, assert_goes_on, losses_in, output_of

if any(importlib.util.find_spec(name) is None for name in ("trl", "peft")):
    pytest.skip(
        "TRL and PEFT are not both here; `nox -s clients` has them in an environment of its own",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def trained(*arguments: object, run: tuple[str, ...] = OURS, ranks: int = 2) -> Losses:
    """What a trainer prints, with torchrun: the loss of each step, and the norm of its gradients."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    output = output_of(*launch, *run, PROGRAMS / "on_cpu.py", PROGRAMS / "trl_trainers.py", *arguments)
    return losses_in(output, run)


def assert_same_run(ours: Losses, theirs: Losses) -> None:
    """The losses are equal; norms may differ in the last bits, as FSDP1 has parameters in a different order."""
    assert {key: values[0] for key, values in ours.items()} == {key: values[0] for key, values in theirs.items()}
    for key, values in ours.items():
        assert values == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize(("form", "option"), [(FORMS[0], "--plain"), (FORMS[0], "--bf16"), (FORMS[1], "--plain")])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_trainers(kind: str, form: str, option: str, tmp_path: Path) -> None:
    """The losses with AdamW are those with torch's FSDP1, and after a resume those of the run that went on.

    With torch's FSDP1, Adam starts anew when a sharded state is resumed.
    """
    losses = trained(tmp_path, form, kind, option)
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    # A resumed run has the log of the first steps, too.
    assert trained(tmp_path, form, kind, option, "--resume=2") == losses
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        theirs = trained(tmp_path / "theirs", form, kind, option, run=())
        assert_same_run(losses, theirs)
        assert trained(tmp_path / "theirs", form, kind, option, "--resume=2", run=()) != theirs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_lora(kind: str, form: str, tmp_path: Path) -> None:
    """With an adapter of PEFT the losses are those with torch's FSDP1, and after a resume those of the run that went on."""
    losses = trained(tmp_path, form, kind, "--lora")
    assert trained(tmp_path, form, kind, "--lora", "--resume=2") == losses
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        assert_same_run(losses, trained(tmp_path / "theirs", form, kind, "--lora", run=()))


@pytest.mark.parametrize(
    ("kind", "form", "option"),
    [
        ("sft", FORMS[0], "--plain"),
        ("sft", FORMS[1], "--lora"),
        ("dpo", FORMS[0], "--lora"),
        ("dpo", FORMS[1], "--plain"),
        ("reward", FORMS[0], "--plain"),
    ],
)
def test_on_other_ranks(kind: str, form: str, option: str, tmp_path: Path) -> None:
    """What two ranks saved is resumed by one, and what that one saved by three, with the state of AdamW, on the same batches."""
    losses = trained(tmp_path, form, kind, option, "--batch=6")
    one = trained(tmp_path, form, kind, option, "--batch=12", "--resume=2", ranks=1)
    # A resumed run has the log of the first steps, too.
    assert_goes_on(one, losses, 0, ranks=1)
    three = trained(tmp_path, form, kind, option, "--batch=4", "--resume=3", ranks=3)
    assert_goes_on(three, losses, 0, ranks=3)


@pytest.mark.parametrize("option", ["--clip", "--accumulate", "--checkpointing"])
def test_options(option: str, tmp_path: Path) -> None:
    """The run is that with torch's FSDP1 but for the last bits of clipping, and a resumed one is the one that went on."""
    losses = trained(tmp_path, FORMS[0], "sft", option)
    assert trained(tmp_path, FORMS[0], "sft", option, "--resume=2") == losses
    theirs = trained(tmp_path / "theirs", FORMS[0], "sft", option, run=())
    assert sorted(losses) == sorted(theirs)
    for key, values in losses.items():
        assert values == pytest.approx(theirs[key], rel=1e-5)
