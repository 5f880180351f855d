"""tools/matrix: which versions it chooses, which interpreters it finds, what it enters, and which names it reads."""

import sys
from pathlib import Path

import pytest
from matrix import names
from matrix.environments import RowError, find_python
from matrix.main import counts, main, node_id, repeated, verdict
from matrix.rows import HOME_PYTHON, HOME_TORCH, PYTHONS, TORCHES, Row, all_rows, choose

HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize(
    ("arguments", "rows", "for_pytest"),
    [
        ([], all_rows(), []),
        (["2.15.0"], [Row("2.15.0", HOME_PYTHON)], []),
        (["3.10", "3.13"], [Row(HOME_TORCH, "3.10"), Row(HOME_TORCH, "3.13")], []),
        (["2.14.1", "3.12"], [Row("2.14.1", "3.12")], []),
        (["2.15.0", "-k", "2.11.0"], [Row("2.15.0", HOME_PYTHON)], ["-k", "2.11.0"]),
        (["-x"], all_rows(), ["-x"]),
    ],
    ids=["all", "a torch", "two Pythons", "both", "some tests", "stop at a failure"],
)
def test_arguments_choose_rows(arguments: list[str], rows: list[Row], for_pytest: list[str]) -> None:
    """Leading versions choose rows, and what follows is for pytest."""
    assert choose(arguments) == (rows, for_pytest)


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


@pytest.mark.skipif(sys.platform == "win32", reason="an interpreter is stood for by a shell script")
def test_an_interpreter_of_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the PATH has none, the newest of pyenv that works is taken."""
    for version, does in {f"{HERE}.9": f'exec {sys.executable} "$@"', f"{HERE}.10": "exit 1"}.items():
        command = tmp_path / "versions" / version / "bin" / "python"
        command.parent.mkdir(parents=True)
        command.write_text(f"#!/bin/sh\n{does}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_python(HERE) == str(tmp_path / "versions" / f"{HERE}.9" / "bin" / "python")


def test_an_interpreter_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which Python is wanted, and where it was looked for."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        RowError, match=r"Python 3\.99 with venv is neither on the PATH nor in .*versions: install it"
    ):
        find_python("3.99")


def test_a_row_without_its_python_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Python that is not there makes the command fail, and the others are tried all the same."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["3.98", "3.99"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said[-2:]] == [
        f"torch {HOME_TORCH}, Python {each}" for each in ("3.98", "3.99")
    ]
    assert all("FAILED: Python 3.9" in line for line in said[-2:])


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
    fine = {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    entry = {"layers": fine, "integration": fine, "lacks": list(names.INSTEAD), "seconds": 60}
    assert verdict(entry) == "ok, layers 1 passed, integration 1 passed, 1 minutes"
    assert verdict({**entry, "integration": {**fine, "failed": 1}}).startswith("FAILED: 1 tests failed")
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
    _first_of("broadcast", "spread")
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
