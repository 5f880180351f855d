"""The page of compatibility is that of the results, and packages claim the versions that were tested."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row
from matrix.main import RESULTS, SUITES
from matrix.names import INSTEAD, lacks, names_used, private_names, unplaced
from matrix.page import python_classifiers, python_range, torch_range, write
from matrix.rows import HOME_TORCH, Row, all_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = RESULTS.with_suffix(".md")
ENTERED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    """Nothing between the markers is edited by hand."""
    copy = tmp_path / PAGE.name
    shutil.copy(PAGE, copy)
    write(ENTERED, copy)
    assert copy.read_text() == PAGE.read_text(), "python tools/matrix --page writes it anew"


def test_the_names_are_those_of_the_sources() -> None:
    """The list of names has each that the packages use, and no other."""
    assert ENTERED["names"] == {"used": len(names_used()), "private": private_names()}, "python tools/matrix --page"


def test_a_page_without_the_markers_is_refused(tmp_path: Path) -> None:
    """Results that have no place are an error that names the markers."""
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(LookupError, match="begin tested"):
        write(ENTERED, page)


@each_row("row", all_rows(), ids=str)
def test_every_row_was_tested(row: Row) -> None:
    """The results of each torch and Python in the table are of these, without a failure or an unknown gap."""
    entry = ENTERED["rows"][row.name]
    assert entry["torch"] == row.torch == entry["installed"].partition("+")[0]
    assert entry["python"].startswith(f"{row.python}.")
    for suite in SUITES:
        assert entry[suite]["failures"] == []
        assert entry[suite]["passed"] > 0
    assert [name for name in entry["lacks"] if name not in INSTEAD] == []


@each_row("name", PROJECTS)
def test_packages_claim_what_was_tested(name: str) -> None:
    """The range of torch, the oldest Python and the classifiers are those of the tested versions."""
    project = PROJECTS[name]
    assert [each for each in project["dependencies"] if re.match(r"torch\b", each)] == [torch_range()]
    assert project["requires-python"] == python_range()
    assert [each for each in project["classifiers"] if re.search(r"Python :: 3\.", each)] == python_classifiers()


def test_the_locked_torch_is_tested_on_every_python() -> None:
    """The torch of tools/constraints.txt, which everything else here runs with, is the one of all Pythons."""
    assert f"\ntorch=={HOME_TORCH}\n" in (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")


def test_whoever_sets_up_is_told_the_range() -> None:
    """tools/run.py, which imports nothing of ours, names the range where torch cannot be installed."""
    lower, upper = torch_range().removeprefix("torch").split(",")
    assert f"flatparam needs torch {lower},{upper})" in (ROOT / "tools" / "run.py").read_text(encoding="utf-8")


def test_this_torch_has_the_names() -> None:
    """The torch of this environment lacks no name that the packages use and cannot do without."""
    assert {"torch.distributed.broadcast", "torch.nn.Module()._buffers", "torch.Tensor"} <= set(names_used())
    assert [name for name in lacks() if name not in INSTEAD] == []


def test_private_attributes_have_a_place() -> None:
    """For each private attribute that is no class's of ours, tools/matrix/names.py says whose it is."""
    assert unplaced() == []
