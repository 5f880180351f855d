"""The table of behaviours: which tests check each of them. `python tools/spec_rows.py` writes its page.

The table is docs/spec-rows.toml; the page, docs/reference/spec-rows.md, shows it to readers.
"""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from house import read_toml
from pages import table

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "spec-rows.toml"
PAGE = ROOT / "docs" / "reference" / "spec-rows.md"

HEAD = """# Behaviours and their tests

What the wrapper promises, row by row, and the tests that check it. Written from `docs/spec-rows.toml` by
`python tools/spec_rows.py`.
"""


@dataclass(frozen=True)
class Row:
    """One behaviour."""

    section: str
    id: str
    title: str
    status: str
    """`done`, `GPU` (on a simulated accelerator and on a GPU), `partly` or `missing`."""
    lacks: str = ""
    """What is not there, in a sentence; empty where the row is done."""
    tests: list[str] = field(default_factory=list)
    """`file::function` from the root of the repository; parameters are left out."""


def rows() -> list[Row]:
    """Return the rows of the table, in order."""
    table: dict[str, dict[str, Any]] = read_toml(TABLE)
    return [Row(section, row_id, **facts) for section, rows_of in table.items() for row_id, facts in rows_of.items()]


def ids_of_tests() -> Iterator[str]:
    """Yield the id of every test function in the repository, read from the sources and not imported."""
    for folder in (*sorted(ROOT.glob("packages/*/tests")), ROOT / "integration_tests", ROOT / "docs"):
        for path in sorted(folder.rglob("test_*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield f"{path.relative_to(ROOT).as_posix()}::{node.name}"


def page() -> str:
    """Return the page as the table makes it."""
    parts = [HEAD]
    for section, of_section in itertools.groupby(rows(), lambda row: row.section):
        lines = [["row", "behaviour", "status", "checked by"], *map(_cells, of_section)]
        parts.append(f"\n## {section}\n\n{table(lines, ['---'])}\n")
    return "".join(parts)


def _cells(row: Row) -> list[str]:
    status = f"{row.status}. {row.lacks}" if row.lacks else row.status
    tests = "<br>".join(f"`{test.removeprefix('packages/').replace('/tests/', '/')}`" for test in row.tests)
    return [row.id, row.title, status, tests]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
