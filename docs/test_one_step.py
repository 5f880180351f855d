"""The page that follows one step through the files lists the files and functions that a step runs now."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "one-step.md"


def rows(page: str) -> list[list[str]]:
    """Return the table without the numbers of lines, which change with every comment."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return [each[1:4] for each in cells if len(each) == 6]


def test_the_table_is_what_a_step_runs() -> None:
    """Nothing in the table is edited by hand, and a step that takes a different way shows up here."""
    before = PAGE.read_text(encoding="utf-8")
    tool = [sys.executable, str(ROOT / "tools" / "structure"), "--page", "--print"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert rows(before), "the page has a table"
    assert rows(done.stdout) == rows(before), "python tools/structure --page writes it anew"
