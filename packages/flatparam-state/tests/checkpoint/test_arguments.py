"""Wrong arguments of a `Checkpointer` are refused at once, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam_comm import SingleCollectives
from flatparam_state import Checkpointer, CheckpointError

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
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
def test_wrong_arguments(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message says what was expected and what was found; no directory is made."""
    with pytest.raises(error) as raised:
        Checkpointer(tmp_path / "run", ranks=SingleCollectives(), **arguments)
    assert str(raised.value) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, "1", True])
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
