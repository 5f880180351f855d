"""The command in a directory that has checkpoints."""

from pathlib import Path

import pytest

from .calling import Caller, make_all


@pytest.fixture
def flatparam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Caller:
    """`flatparam ckpt ...`; an argument `@name` is that name in a directory with `a.pt` and `run`."""
    make_all(tmp_path)
    return Caller(tmp_path, capsys)
