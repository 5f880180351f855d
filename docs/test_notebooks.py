"""Every notebook runs, and prints what is committed with it; without Jupyter, cell by cell, in one namespace."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))


def text_of(lines: Any) -> str:
    """A text in a notebook, which is a list of lines."""
    return "".join(lines)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path) -> None:
    """Each code cell runs, and prints its committed output."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(
                compile(text_of(cell["source"]), f"{notebook.name}[{cell['execution_count']}]", "exec"),
                namespace,
            )
        assert printed.getvalue() == "".join(text_of(output["text"]) for output in cell["outputs"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("page", ["index.md", "getting-started.md"])
def test_notebook_is_linked(notebook: Path, page: str) -> None:
    """The first pages lead to each notebook."""
    assert f"({notebook.relative_to(DOCS).as_posix()})" in (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(notebook: Path) -> None:
    """Each link to a file of ours is to one that is there."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for part in text_of(cell["source"]).split("](")[1:] if cell["cell_type"] == "markdown" else []:
            assert (notebook.parent / part.partition(")")[0]).exists(), part
