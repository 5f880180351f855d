"""How the checks of one session run beside each other: `tools/turns.py`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import turns
from turns import Beside, Program

MEETS = """
import pathlib, sys, time
folder, mine, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
(folder / mine).write_text("")
while not (folder / other).exists():
    time.sleep(0.01)
print("met", other)
"""


class Failed(Exception):
    """What the session below raises for nox."""


class Session:
    """What is logged, and an error."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    def log(self, text: str) -> None:
        self.logged.append(text)

    def error(self, text: str) -> None:
        raise Failed(text)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose environment is this Python's."""
    monkeypatch.setattr(turns, "shared", lambda session: SimpleNamespace(python=sys.executable))
    return Session()


def test_programs_run_at_once(session: Session, tmp_path: Path) -> None:
    """With two workers two programs wait for each other, and what each said is told under its name."""
    programs = {
        name: Program(("-c", MEETS, str(tmp_path), name, other)) for name, other in (("one", "two"), ("two", "one"))
    }
    beside = Beside(programs, workers=2)
    beside.start(session)  # type: ignore[arg-type]
    beside.finish(session)  # type: ignore[arg-type]
    assert sorted(text.partition(",")[0] for text in session.logged) == ["one", "two"]
    assert {text.strip()[-7:] for text in session.logged} == {"met one", "met two"}


def test_programs_that_fail_are_named(session: Session) -> None:
    """All run, and the session fails with the names of those that did."""
    programs = {
        name: Program(("-c", f"raise SystemExit({status})")) for name, status in zip("abc", (1, 0, 2), strict=True)
    }
    beside = Beside(programs)
    beside.start(session)  # type: ignore[arg-type]
    with pytest.raises(Failed, match="These failed: a, c"):
        beside.finish(session)  # type: ignore[arg-type]
    assert len(session.logged) == 3


def test_a_program_has_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the session, and without those that are None."""
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("TAKEN", "taken")
    program = ("-c", "import os; print(*(os.environ.get(name) for name in ('KEPT', 'TAKEN', 'GIVEN')))")
    done, _ = Program(program, {"TAKEN": None, "GIVEN": "given"}).run(sys.executable)
    assert done.stdout == "kept None given\n"
