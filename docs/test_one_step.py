"""The page that follows one step through the files lists the files and functions that a step runs now."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "one-step.md"


def rows(page: str) -> dict[str, list[str]]:
    """Return the files of the table, in order, each with its functions."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return {
        each[1]: re.findall(r"`([\w.]+)`", each[3]) for each in cells if len(each) == 6 and "`" in each[1]
    }


def test_the_table_is_what_a_step_runs() -> None:
    """Nothing in the table is edited by hand, and a step that takes a different way shows up here.

    The files are compared. Which functions a collective runs depends on whether the other rank was there before.
    """
    before = rows(PAGE.read_text(encoding="utf-8"))
    tool = [sys.executable, str(ROOT / "tools" / "structure"), "--page", "--print"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert before, "the page has a table"
    assert list(rows(done.stdout)) == list(before), "python tools/structure --page writes it anew"


def test_every_function_of_the_table_exists() -> None:
    """A reader who looks for a function of the table in its file finds it there."""
    for file, names in rows(PAGE.read_text(encoding="utf-8")).items():
        (path,) = (ROOT / "packages").glob(f"*/src/{file.strip('`')}")
        text = path.read_text(encoding="utf-8")
        assert [name for name in names if f"def {name.rpartition('.')[2]}(" not in text] == [], file
