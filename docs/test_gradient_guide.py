"""The picture of "Is my gradient right?" is what its first command writes, for the files that the guide shows."""

import re
import sys
from pathlib import Path

import pytest

from flatparam.command import main

GUIDE = Path(__file__).parent / "guides" / "is-my-gradient-right.md"


def without_digits(text: str) -> list[str]:
    """The lines without errors, whose digits, and whether there are any, depend on the processor."""
    text = re.sub(r"\d\.\de[-+]\d\d", "...", text)
    return re.sub("equal bits|within the order of sums", "right", text).splitlines()


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are those of the command, which exits with 1."""
    text = GUIDE.read_text(encoding="utf-8")
    for name, content in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["case.py", "trainer.py"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    command = re.findall(r"```console\n\$ flatparam (.*?)\n```", text)[0]
    assert main(command.split()) == 1
    picture = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0]
    assert without_digits(capsys.readouterr().out) == without_digits(picture)
