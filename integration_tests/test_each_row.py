"""Tables that one test goes through: `tools/each_row.py`."""

from pathlib import Path

import pytest
from each_row import each_row

pytest_plugins = ["pytester"]


def test_every_row_runs() -> None:
    """Rows run in order, with their values by name, also one table inside another, and with what the test takes."""
    seen = []

    @each_row("first", "ab", ids=dict.fromkeys("ab"))
    @each_row("second, third", [(1, 2), pytest.param(3, 4, id="larger")])
    def claim(fixture: str, first: str, second: int, third: int) -> None:
        seen.append((fixture, first, second, third))

    claim(fixture="f")  # type: ignore[call-arg]
    assert seen == [("f", first, *pair) for first in "ab" for pair in ((1, 2), (3, 4))]


def test_rows_that_fail_are_named() -> None:
    """All rows run, and the error has the names of those that failed, and comes from the first one's."""
    seen = []

    @each_row("value", [1, pytest.param(2, id="two"), 3, 4], ids=["one", "unused", "three", "four"])
    def claim(value: int) -> None:
        seen.append(value)
        if value == 4:
            pytest.fail("four was called")
        assert value % 2, "it is even"

    with pytest.raises(AssertionError, match=r"(?s)2 of 4 rows of value fail:\n  two: .*it is even.*four was"):
        claim()  # type: ignore[call-arg]
    assert seen == [1, 2, 3, 4]


def test_rows_have_folders_of_their_own(tmp_path: Path) -> None:
    """What a row leaves in `tmp_path` is not there for the next, also with one table inside another."""

    @each_row("first", "ab")
    @each_row("second", [1, 2])
    def claim(first: str, second: int, tmp_path: Path) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "left").write_text(first)

    claim(tmp_path=tmp_path)  # type: ignore[call-arg]
    assert len(list(tmp_path.rglob("left"))) == 4


def test_what_does_not_fit_is_refused() -> None:
    """A name that is no argument, a row of another length, one with marks, and one that skips are errors."""
    with pytest.raises(TypeError, match="expected arguments of print, found nothing"):
        each_row("nothing", [1])(print)
    with pytest.raises(TypeError, match="expected 2 values, for a, b, found"):
        each_row("a, b", [(1, 2), (1,)])
    with pytest.raises(TypeError, match="expected rows without marks"):
        each_row("a", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(AssertionError, match="1 of 2 rows of a fail"):
        each_row("a", [1, 2])(lambda a: pytest.skip("not here") if a == 1 else None)()


def test_pytest_sees_one_test(pytester: pytest.Pytester) -> None:
    """To pytest it is one test, with its fixtures, marks and docstring."""
    pytester.makepyfile(
        """
        import pytest
        from each_row import each_row

        @pytest.fixture
        def number():
            return 3

        @pytest.mark.parametrize("twice", [False, True])
        @each_row("value", [1, 2])
        def test_it(number, twice, value):
            assert value < number

        @each_row("value", [3, 4, 2])
        def test_other(number, value):
            assert value < number
        """
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*2 of 3 rows of value fail:*"])
