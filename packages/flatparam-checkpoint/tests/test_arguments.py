"""Wrong arguments of a `Checkpointer` are refused at once, before anything is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import SingleCollectives
from flatparam_files import CheckpointError, Moment

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@each_row(
    ("arguments", "error", "message"),
    [
        ({"directory": ""}, ValueError, "expected a directory, found an empty path"),
        ({"keep": "2"}, ValueError, "expected keep to be None or a number of at least 1, found '2'"),
        ({"keep": 0}, ValueError, "expected keep to be None or a number of at least 1, found 0"),
        ({"keep": True}, ValueError, "expected keep to be None or a number of at least 1, found True"),
        ({"model": 3}, TypeError, "expected a module as model, or None, found int"),
        (
            {"model": MODEL, "optimizer": [OPTIMIZER]},
            TypeError,
            "expected an optimizer, a dictionary of several by name, or None, found list",
        ),
        (
            {"model": MODEL, "optimizer": {"a": MODEL}},
            TypeError,
            "expected an optimizer, a dictionary of several by name, or None, found Linear",
        ),
        (
            {"model": MODEL, "optimizer": {"state": OPTIMIZER}},
            CheckpointError,
            "'state' cannot be the name of an optimizer; give it a different one",
        ),
        ({"optimizer": OPTIMIZER}, ValueError, "expected the model of the optimizer's parameters too"),
        (
            {"on_save_error": "ignore"},
            ValueError,
            "expected on_save_error to be 'raise' or 'warn', found 'ignore'",
        ),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """The message says what was expected and what was found; no directory is made."""
    with pytest.raises(error) as raised:
        Checkpointer(**{"directory": tmp_path / "run", "ranks": SingleCollectives(), **arguments})
    assert str(raised.value) == message
    assert not (tmp_path / "run").exists()


@each_row("step", [-1, 2**63, 1.0, "1", True])
def test_wrong_steps(tmp_path: Path, step: Any) -> None:
    """A step that no checkpoint can have is refused before anything is written."""
    checkpointer = Checkpointer(tmp_path / "run", ranks=SingleCollectives())
    with pytest.raises(ValueError, match=r"expected a step of at least 0 and at most 2\*\*63 - 1, found "):
        checkpointer.save(step)
    assert not (tmp_path / "run").exists()


def test_a_relative_directory_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that changes its folder later on finds its checkpoints, and saves to the same place."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", ranks=SingleCollectives()) as checkpointer:
        checkpointer.save(1, extra={"a": 1})
        monkeypatch.chdir(tmp_path / "other")
        checkpointer.save(2)
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load(1) is not None
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]
    assert not any((tmp_path / "other").iterdir())


@each_row("asynchronous", [False, True])
def test_a_private_directory(asynchronous: bool, tmp_path: Path) -> None:
    """With `private`, nobody but its owner can enter the directory, a checkpoint in it, or read a file, while saving too."""
    seen: set[int] = set()
    root = tmp_path / "run"
    root.mkdir(mode=0o755)

    def look(moment: Moment) -> None:
        seen.update(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (root, *root.rglob("*")))

    with Checkpointer(
        root,
        MODEL,
        OPTIMIZER,
        ranks=SingleCollectives(),
        asynchronous=asynchronous,
        private=True,
        keep=1,
        on_moment=look,
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, extra={"a": 1})
    assert seen == {0}
    assert {path.name for path in root.rglob("*")} >= {
        "latest",
        "lock",
        "manifest.json",
        "rank-00000.safetensors",
    }
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (root, *root.rglob("*")))


def test_the_umask_decides(tmp_path: Path) -> None:
    """Without it, files are as the umask lets them be, as before; in a directory that is private already they are, too."""
    before = os.umask(0o022)
    try:
        (tmp_path / "own").mkdir(mode=0o700)
        for name, mode in (("run", 0o644), ("own", 0o600)):
            with Checkpointer(tmp_path / name, MODEL, ranks=SingleCollectives()) as checkpointer:
                checkpointer.save(1)
            files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
            assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
    finally:
        os.umask(before)
