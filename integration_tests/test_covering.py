"""Which combinations of a test's parameters are short: `tools/covering.py`."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import Row, covering

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
    import pytest

    @pytest.fixture(params=["flat", "originals"])
    def exposure(request):
        return request.param

    @pytest.fixture(params=[1, 2])
    def ranks(request):
        return request.param

    def test_one(exposure, ranks): pass

    def test_other(exposure, ranks): pass

    @pytest.mark.parametrize(("given", "expected"), [(1, 1), (1, 2), (2, 1)])
    def test_table(given, expected): pass

    @pytest.mark.pairs("first", "second")
    @pytest.mark.parametrize("first", "ab")
    @pytest.mark.parametrize("second", "cd")
    def test_pairs(first, second, exposure): pass

    @pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
    def test_twins(where, exposure): pass
"""


def product(**values: str) -> list[Row]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def pairs_of(rows: list[Row], *names: str) -> set[tuple[object, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


@pytest.mark.parametrize("length", [1, 3, 5])
def test_each_value_is_in_each_test_and_each_pair_in_the_file(length: int) -> None:
    """Each value of each parameter stays; of those that tests share, the tests have each pair together."""
    grid = product(a="01", b="01", c="01", own="12345"[:length])
    tests = [grid, grid]
    chosen = covering(tests, pairs=[set(), set()], shared={"a", "b", "c"})
    kept = [[grid[number] for number in numbers] for numbers in chosen]
    for rows in kept:
        assert all(pairs_of(rows, name) == pairs_of(grid, name) for name in grid[0])
    for first, second in itertools.combinations("abc", 2):
        assert pairs_of([*kept[0], *kept[1]], first, second) == pairs_of(grid, first, second)
    assert sum(map(len, chosen)) <= max(6, 2 * length + 2)


def test_named_parameters_have_each_pair() -> None:
    """Each pair of values of named parameters stays, and values of the third meet them in turn."""
    grid = product(a="012", b="012", c="01")
    (chosen,) = covering([grid], pairs=[{"a", "b"}], shared=set())
    kept = [grid[number] for number in chosen]
    assert len(kept) == 9
    assert pairs_of(kept, "a", "b") == pairs_of(grid, "a", "b")
    assert pairs_of(kept, "a", "c") == pairs_of(grid, "a", "c")


def test_values_meet_in_turn() -> None:
    """A parameter with many values has them with different values of the others."""
    grid = product(own="12345678", a="01", b="01")
    (chosen,) = covering([grid], pairs=[set()], shared=set())
    assert len(chosen) == 8
    assert len(pairs_of([grid[number] for number in chosen], "a", "b")) == 4


def test_what_is_left_out_is_long(tmp_path: Path) -> None:
    """What is marked long is the rest, nothing is in both, and tables and tests that need a GPU stay whole."""
    tests = tmp_path / "test_them.py"
    tests.write_text("\n".join(line[4:] for line in TESTS.splitlines()), encoding="utf-8")

    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_finish(session):\n"
        "    print(*('=' + str(bool(each.get_closest_marker('long'))) + each.name for each in session.items), sep='\\n')\n",
        encoding="utf-8",
    )
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "covering", str(tests))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    short, rest = ({line.removeprefix(head) for line in lines if line.startswith(head)} for head in ("=False", "=True"))
    assert len(short | rest) == 2 * 4 + 3 + 8 + 4
    assert not short & rest
    assert {name.partition("[")[0] for name in rest} == {"test_one", "test_other", "test_pairs"}
    of_both = {name.partition("[")[2] for name in short if name.startswith(("test_one", "test_other"))}
    assert len(of_both) == 4
    assert sum(name.startswith("test_pairs") for name in short) == 4
    assert not any("table" in name or "twins" in name for name in rest)


def test_a_pair_of_nothing_is_refused(tmp_path: Path) -> None:
    """A mark that names what is no parameter is an error that says so."""
    tests = tmp_path / "test_it.py"
    tests.write_text(
        "import pytest\n\n@pytest.mark.pairs('rank')\n@pytest.mark.parametrize('ranks', [1, 2])\ndef test_it(ranks): pass\n",
        encoding="utf-8",
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "covering", str(tests))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "`pairs` names rank, which are no parameters of it" in done.stdout + done.stderr
