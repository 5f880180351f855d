"""The faults that `nox -s run -- planted` plants: each is one change of the sources as they are, which still compile."""

import subprocess
from pathlib import Path
from typing import Any

import planted_faults
import pytest
from each_row import each_row
from planted_faults import FAULTS, found_by, main, planted


@each_row("layer", FAULTS)
def test_each_fault_is_a_change_of_the_sources(layer: str, tmp_path: Path) -> None:
    """The text of each is in its file once, and what is put in its place makes a different program."""
    assert len(FAULTS[layer]) >= 10
    for number, fault in enumerate(FAULTS[layer]):
        file = planted(layer, fault, tmp_path / str(number)) / f"flatparam_{layer}" / fault[0]
        compile(file.read_text(encoding="utf-8"), str(file), "exec")
        assert fault[1] != fault[2]


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """A fault that cannot be planted would be a fault that is found for the wrong reason."""
    with pytest.raises(LookupError, match=r"core, names\.py: expected 'no such text' once, found it 0 times"):
        planted("core", ("names.py", "no such text", ""), tmp_path)


@each_row("status", [0, 1])
def test_the_verdict(status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault is found if tests fail, by the first one, and else is looked for in the tests above, and told."""
    ran = list[str]()

    def run(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        assert Path(named["env"]["PYTHONPATH"].split(":")[0]).name != "src", "the copy comes first"
        ran.append(command[-1])
        return subprocess.CompletedProcess(command, status, "FAILED tests/test_x.py::test_y - boom\n" * status, "")

    monkeypatch.setattr(planted_faults.subprocess, "run", run)
    monkeypatch.setattr(planted_faults, "FAULTS", {"core": FAULTS["core"][:1]})
    assert found_by("core", FAULTS["core"][0], "0") == ("tests/test_x.py::test_y" if status else None)
    assert ran == ["packages/flatparam-core/tests", *(() if status else planted_faults.ABOVE)]
    assert main(["core"]) == 1 - status
    assert ("NOT FOUND" in capsys.readouterr().out) == (not status)
