"""Programs of Lightning, unchanged, with `python -m flatparam run` in front; `nox -s clients` runs them.

Lightning starts the second rank itself.
"""

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

if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning is not here; `nox -s clients` has it in an environment of its own", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

FORMS = ("sharded", "full")


@pytest.mark.parametrize("loop", ["fabric", "trainer"])
def test_unequal_work(loop: str) -> None:
    """Ranks with micro-batches of any number and size train as one process: with Fabric, and with manual optimization."""
    output = output_of(*OURS, PROGRAMS / "unequal_lightning.py", loop)
    found = {
        int(rank): (float(ours), float(alone))
        for rank, ours, alone in re.findall(r"(?m)^output (\d) (\S+) (\S+)$", output)
    }
    assert sorted(found) == [0, 1]
    for ours, alone in found.values():
        assert ours == pytest.approx(alone, rel=1e-5)


def fabric(*arguments: object, run: tuple[str, ...] = OURS) -> Losses:
    """What the loop with Fabric prints: the losses of each step, and the norm of the gradients that it clips."""
    return losses_in(output_of(*run, PROGRAMS / "fabric_loop.py", *arguments), run)


def trainer(*arguments: object, run: tuple[str, ...] = OURS) -> Losses:
    """What the Trainer prints: the loss of each batch."""
    return losses_in(output_of(*run, PROGRAMS / "lightning_trainer.py", *arguments), run)


@pytest.mark.parametrize(
    ("form", "option"),
    [
        *((FORMS[0], option) for option in ("--plain", "--accumulate", "--bf16", "--checkpointing", "--flat")),
        *((FORMS[1], option) for option in ("--plain", "--checkpointing", "--flat")),
    ],
)
def test_fabric(form: str, option: str, tmp_path: Path) -> None:
    """Losses and norms with AdamW are those with torch's FSDP1, and after a resume those of the run that went on.

    A run that was saved with torch's FSDP1 goes on here as it did there.
    """
    losses = fabric(tmp_path, form, option)
    assert sorted(losses) == [(rank, step) for rank in range(2) for step in range(4)]
    assert fabric(tmp_path, form, option, "--resume=2") == after(2, losses)
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        assert fabric(tmp_path / "theirs", form, option, run=()) == losses
        assert fabric(tmp_path / "theirs", form, option, "--resume=2") == after(2, losses)


@pytest.mark.parametrize("form", FORMS)
def test_fabric_on_other_ranks(form: str, tmp_path: Path) -> None:
    """What two ranks saved is resumed by one, and what that one saved by three, each with the state of AdamW."""
    losses = fabric(tmp_path, form)
    assert_goes_on(fabric(tmp_path, form, "--resume=2", "--ranks=1"), losses, 2, ranks=1)
    assert_goes_on(fabric(tmp_path, form, "--resume=3", "--ranks=3"), losses, 3, ranks=3)


@pytest.mark.parametrize(
    ("form", "option"),
    [
        *((FORMS[0], option) for option in ("--plain", "--accumulate", "--bf16", "--checkpointing", "--clip")),
        *((FORMS[1], option) for option in ("--plain", "--checkpointing")),
    ],
)
def test_trainer(form: str, option: str, tmp_path: Path) -> None:
    """The losses with AdamW are those with torch's FSDP1, and after a resume those of the run that went on.

    A run that was saved with torch's FSDP1 goes on here as it did there.
    """
    batches = 8 if option == "--accumulate" else 4
    losses = trainer(tmp_path, form, option)
    assert sorted(losses) == [(rank, batch) for rank in range(2) for batch in range(batches)]
    assert trainer(tmp_path, form, option, "--resume=1") == after(batches // 2, losses)
    if form == FORMS[0]:
        # It cannot save full states on the CPU.
        assert trainer(tmp_path / "theirs", form, option, run=()) == losses
        assert trainer(tmp_path / "theirs", form, option, "--resume=1") == after(batches // 2, losses)


@pytest.mark.parametrize("form", FORMS)
def test_trainer_on_other_ranks(form: str, tmp_path: Path) -> None:
    """What two ranks saved is resumed by one, and what that one saved by three, with the state of AdamW, on the same batches."""
    losses = trainer(tmp_path, form, "--epochs=3")
    one = trainer(tmp_path, form, "--epochs=3", "--resume=1", "--ranks=1")
    assert_goes_on(one, losses, 2, ranks=1)
    three = trainer(tmp_path, form, "--epochs=3", "--resume=2", "--ranks=3")
    assert_goes_on(three, losses, 4, ranks=3)


def validations(*arguments: object, run: tuple[str, ...] = OURS) -> list[list[str]]:
    """What each rank computes in validation, in order: rank, epoch, loss."""
    lines = [line.split() for line in output_of(*run, PROGRAMS / "lightning_trainer.py", *arguments).splitlines()]
    return sorted((words[1:] for words in lines if words[:1] == ["validation"]), key=lambda words: words[0])


@pytest.mark.parametrize("form", FORMS)
def test_an_average_of_the_weights(form: str, tmp_path: Path) -> None:
    """With `ShardedEMA` in the callback of the guide, validation is that of DDP with Lightning's own average, up to rounding."""
    found = validations(tmp_path, form, "--sharded-average")
    expected = validations(tmp_path / "ddp", "ddp", "--average", run=())
    assert [words[:2] for words in found] == [words[:2] for words in expected]
    assert [float(loss) for *_, loss in found] == pytest.approx([float(loss) for *_, loss in expected], rel=1e-4)
    assert len(found) == 2 * (2 + 2 * 2)


def test_lightnings_average_is_refused(tmp_path: Path) -> None:
    """Lightning copies the model before it is sharded: its average is refused by name, with the line that works."""
    with pytest.raises(AssertionError, match=r"before the model was sharded.*ema = flatparam.ShardedEMA\(model"):
        trainer(tmp_path, "full", "--average")
