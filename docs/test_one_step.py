"""The page that follows one step through the files lists the files and functions that a step runs now."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "one-step.md"


def rows(page: str) -> dict[str, list[str]]:
    """Return the files of the table, in order, each with its functions."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return {each[1]: re.findall(r"`([\w.]+)`", each[3]) for each in cells if len(each) == 6 and "`" in each[1]}


@pytest.mark.long
def test_the_table_is_what_a_step_runs() -> None:
    """Nothing in the table is edited by hand, and a step that takes a different way shows up here.

    The files are compared. Which functions a collective runs depends on whether the other rank was there before.
    """
    before = rows(PAGE.read_text(encoding="utf-8"))
    tool = [sys.executable, str(ROOT / "tools" / "structure"), "--page", "--print"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert before, "the page has a table"
    assert list(rows(done.stdout)) == list(before), "python tools/structure --page writes it anew"


@pytest.mark.long
def test_a_step_is_one_text() -> None:
    """The step's code is printed in its order, each function once and whole, with the place where it stands."""
    tool = [sys.executable, str(ROOT / "tools" / "structure"), "--step"]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    ast.parse(text)
    headers = re.findall(r"^# ([\w/]+\.py):(\d+) ([\w.]+)$", text, flags=re.MULTILINE)
    assert len(set(headers)) == len(headers) > 100
    order = [name for _, _, name in headers]
    turns = ("before_forward", "after_forward", "BackwardPass.enter", "Reducer.issue", "BackwardPass.finish")
    assert sorted(turns, key=order.index) == list(turns)
    for file, line, name in headers:
        (path,) = (ROOT / "packages").glob(f"*/src/{file}")
        rest = path.read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        first = next(each for each in rest if not each.strip().startswith(("@", ")")))
        assert first.strip().startswith(f"def {name.rpartition('.')[2]}("), (file, line, name)


def test_every_function_of_the_table_exists() -> None:
    """A reader who looks for a function of the table in its file finds it there."""
    for file, names in rows(PAGE.read_text(encoding="utf-8")).items():
        (path,) = (ROOT / "packages").glob(f"*/src/{file.strip('`')}")
        text = path.read_text(encoding="utf-8")
        assert [name for name in names if f"def {name.rpartition('.')[2]}(" not in text] == [], file
