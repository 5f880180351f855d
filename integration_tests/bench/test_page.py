"""docs/performance.md is what the benchmark makes of its results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bench.main import HOST_RESULTS, RESULTS, main
from bench.page import write
from each_row import each_row


@each_row("results", [RESULTS, HOST_RESULTS], ids=lambda results: results.stem)
def test_the_page_is_that_of_the_results(tmp_path: Path, results: Path) -> None:
    """Nothing between the markers is edited by hand."""
    page = results.with_suffix(".md")
    copy = tmp_path / page.name
    shutil.copy(page, copy)
    write(json.loads(results.read_text()), copy)
    assert copy.read_text() == page.read_text()


def test_a_page_without_the_markers_is_refused(tmp_path: Path) -> None:
    """A section of results that has no place is an error that names the markers."""
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(LookupError, match="begin steps"):
        write({"steps": {}}, page)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line lists its commands."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "instructions" in capsys.readouterr().out
