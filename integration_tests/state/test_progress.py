"""The bar of what can take long: on the first rank of a terminal, and switched off in one place."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives, run_threads
from flatparam_files.disk import progress
from flatparam_publish import Mailbox, Publisher


class Terminal(io.StringIO):
    """Keeps what it is shown."""

    def isatty(self) -> bool:
        return True


def run(world: Collectives, directory: Path) -> None:
    """Save, load and publish a sharded model."""
    torch.manual_seed(0)
    model = FSDP(nn.Linear(512, 512), process_group=world)
    with Checkpointer(directory / "run", model, ranks=world) as checkpointer:
        checkpointer.save(3)
        checkpointer.load()
    Publisher(model, Mailbox(directory / "mailbox")).publish()


@pytest.mark.parametrize("switch", ["", "0"])
def test_bars(switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save, load and publish show one bar each, over bytes, for all ranks together; FLATPARAM_PROGRESS=0 shows none."""
    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setenv("FLATPARAM_PROGRESS", switch)
    run_threads(2, lambda world: run(world, tmp_path))
    shown = seen.getvalue()
    for name in ("save step 3", "load step 3", "publish"):
        assert shown.count(f"{name}:   0%") == (0 if switch else 1)
    assert "None" not in shown
    assert (shown == "") == bool(switch)


def test_a_pipe_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, nothing is shown, whatever time it takes."""
    with progress.progress_bar("save", 10) as observe:
        observe(10)
    assert capfd.readouterr().err == ""


def test_more_than_was_known() -> None:
    """More than the total is shown as the total; without a total, there is a count."""
    shown = Terminal()
    for total, line in ((10, "100%"), (None, "12")):
        before, sys.stderr = sys.stderr, shown
        try:
            with progress.progress_bar("plan", total, True, unit=" plans") as observe:
                observe(12)
        finally:
            sys.stderr = before
        assert line in shown.getvalue()
