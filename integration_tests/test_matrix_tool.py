"""tools/matrix: which versions it tests, what it enters, and which names it reads."""

import json
import sys
from pathlib import Path

import pytest
import torch
from matrix import main as tool
from matrix import names
from matrix.main import counts, main, node_id, repeated, this_row, verdict
from matrix.rows import PYTHONS, TORCHES, Row, all_rows, lowest_versions

FINE = {"passed": 1, "failed": 0, "skipped": 0, "failures": []}


def test_rows_cover_all_versions() -> None:
    """Every torch and every Python is in a row, and no row is there twice."""
    rows = all_rows()
    assert {row.torch for row in rows} == set(TORCHES)
    assert {row.python for row in rows} == set(PYTHONS)
    assert len(set(rows)) == len(rows) == len(TORCHES) + len(PYTHONS) - 1


def test_the_command_lists_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names every row, and installs nothing."""
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(row) for row in all_rows()]


def test_the_row_is_that_of_this_environment() -> None:
    """The command tests the torch and the Python that run it."""
    row = this_row()
    assert torch.__version__.startswith(row.torch)
    assert sys.version.startswith(f"{row.python}.")


@pytest.fixture
def untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command enters in a folder of its own, and pytest is not run: what it would run is in this list."""
    called: list[list[str]] = []

    def pretend(arguments: list[str]) -> int:
        called.append(list(arguments))
        reports = [each.partition("=")[2] for each in arguments if each.startswith("--junit-xml=")]
        for report in reports:
            Path(report).write_text('<testsuite><testcase classname="a" name="fine"/></testsuite>')
        return 0

    results = tmp_path / "compatibility.json"
    page = tool.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    results.with_suffix(".md").write_text(page, encoding="utf-8")
    for name, value in {"_run": pretend, "RESULTS": results, "HOME": tmp_path / "reports"}.items():
        monkeypatch.setattr(tool, name, value)
    return called


@pytest.mark.long
def test_what_is_entered(untested: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --enter the row's counts are in the results; without it nothing is."""
    row = all_rows()[0]
    monkeypatch.setattr(tool, "this_row", lambda: row)
    assert main([]) == 0
    assert not tool.RESULTS.exists()
    assert main(["--enter"]) == 0
    entered = json.loads(tool.RESULTS.read_text())["rows"]
    assert list(entered) == [row.name]
    assert all(entered[row.name][suite] == FINE for suite in tool.SUITES)
    assert len(untested) == 2 * len(tool.SUITES)
    assert main(["--enter", "--again"]) == 0  # nothing had failed
    assert len(untested) == 2 * len(tool.SUITES)


def test_some_tests(untested: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """What is no option of the command goes to pytest, and is not entered."""
    assert main(["-k", "mesh"]) == 0
    assert untested[0][-2:] == ["-k", "mesh"]
    assert main(["--enter", "-k", "mesh"]) == 1
    assert "a part of the tests is not entered: leave out -k mesh, or --enter" in capsys.readouterr().out


def test_a_row_that_is_not_in_the_table(
    untested: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the versions of the table are entered in it."""
    monkeypatch.setattr(tool, "this_row", lambda: Row("2.10.0", "3.10"))
    assert main(["--enter"]) == 1
    assert "torch 2.10.0, Python 3.10 is not in the table: its rows are torch 2.11.0" in capsys.readouterr().out
    assert untested == []


def test_the_lowest_versions(tmp_path: Path) -> None:
    """Of several ranges the highest lower end counts, in three numbers; neighbours are not named."""
    for name, needs in {"flatparam-a": ["attrs>=23.2", "flatparam>=0.1"], "flatparam": ["attrs>=24"]}.items():
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        extras = {"test": ["pytest>=8.1.2"], "train": ["numpy>=2"]}
        text = f"[project]\ndependencies = {needs}\n[project.optional-dependencies]\n"
        text += "".join(f"{extra} = {lines}\n" for extra, lines in extras.items())
        (folder / "pyproject.toml").write_text(text)
    assert lowest_versions(tmp_path) == {"attrs": "24.0.0", "pytest": "8.1.2"}
    assert lowest_versions()["torch"] == TORCHES[0]


REPORT = """<testsuites><testsuite>
  <testcase classname="a.b" name="fine"/>
  <testcase classname="a.b" name="left out"><skipped/></testcase>
  <testcase classname="a.b" name="wrong"><failure/></testcase>
  <testcase classname="a.b" name="broken"><error/></testcase>
</testsuite></testsuites>"""


def test_results_are_read_from_the_report(tmp_path: Path) -> None:
    """An error counts as a failure, and failures are named."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    expected = {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a.b::wrong", "a.b::broken"]}
    assert counts(report) == expected


def test_what_fails_once_is_no_failure() -> None:
    """A test that passes when it is run alone has passed, and is named; one that fails twice has failed."""
    first = {"passed": 1, "failed": 2, "skipped": 0, "failures": ["a.b::wrong", "a.b::late"]}
    again = {"passed": 1, "failed": 1, "skipped": 0, "failures": ["a.b::wrong"]}
    expected = {"passed": 2, "failed": 1, "skipped": 0, "failures": ["a.b::wrong"], "repeated": ["a.b::late"]}
    assert repeated(first, again) == expected
    skipped = {"passed": 0, "failed": 0, "skipped": 1, "failures": []}
    assert repeated(expected, skipped) == {
        **{"passed": 2, "failed": 0, "skipped": 1, "failures": []},
        "repeated": ["a.b::late", "a.b::wrong"],
    }


def test_a_test_is_found_again() -> None:
    """The name in a report leads to the test."""
    assert node_id("a.b.test_c::test_d[e.f-g]") == "a/b/test_c.py::test_d[e.f-g]"


def test_what_makes_a_row_fail() -> None:
    """A test that fails, and a name that is lacking without anything in its place."""
    entry = {"layers": FINE, "integration": FINE, "lacks": list(names.INSTEAD), "seconds": 60}
    assert verdict(entry) == "ok, layers 1 passed, integration 1 passed, 1 minutes"
    assert verdict({**entry, "integration": {**FINE, "failed": 1}}).startswith("FAILED: 1 tests failed")
    assert verdict({**entry, "lacks": ["torch.gone"]}).endswith("names it lacks: torch.gone")


def test_names_are_read_from_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports, chains of attributes, names that are looked up and private attributes are found; ours are not."""
    source = """
import torch
import torch.distributed as dist
from torch import nn
class Ours:
    def __init__(self):
        self._own = torch.tensor([0]).numel()
def f(module, group):
    from torch.autograd.graph import gone as there
    first_of("broadcast", "spread")
    return nn.Module.forward, dist.group.WORLD, Ours()._own, module._parameters, group._secret, there.more
"""
    monkeypatch.setattr(names, "_sources", lambda: (names.ast.parse(source),))
    names.private_attributes.cache_clear()
    try:
        assert names.names_used() == [
            "torch",
            "torch.autograd.graph.gone",
            "torch.autograd.graph.gone.more",
            "torch.distributed",
            "torch.distributed.broadcast",
            "torch.distributed.group.WORLD",
            "torch.distributed.spread",
            "torch.nn",
            "torch.nn.Module()._parameters",
            "torch.nn.Module.forward",
            "torch.tensor",
        ]
        assert names.private_names() == ["torch.nn.Module()._parameters"]
        assert names.unplaced() == ["_secret"]
        assert names.lacks() == [
            "torch.autograd.graph.gone",
            "torch.autograd.graph.gone.more",
            "torch.distributed.spread",
        ]
    finally:
        names.private_attributes.cache_clear()
