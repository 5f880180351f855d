"""The table of behaviours names tests that exist, and its page is the table's."""

from collections import Counter

import pytest
from spec_rows import PAGE, Row, ids_of_tests, page, rows

ROWS = rows()
TESTS = frozenset(ids_of_tests())


def test_no_row_is_listed_twice() -> None:
    """A row belongs to one section, and a row's title and each of its tests are said once."""
    for said in ([row.id for row in ROWS], [row.title for row in ROWS], *(row.tests for row in ROWS)):
        assert [value for value, count in Counter(said).items() if count > 1] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_named_tests_exist(row: Row) -> None:
    """Every test that a row names is a function in its file."""
    assert [test for test in row.tests if test not in TESTS] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_status_says_what_there_is(row: Row) -> None:
    """A row that is done is checked by a test; of any other the table says what it lacks."""
    assert row.status in ("done", "GPU", "partly", "missing")
    is_done = row.status in ("done", "GPU")
    assert bool(row.lacks) != is_done
    assert row.tests or not is_done


def test_page_is_that_of_the_table() -> None:
    """The page has what the table says; `python tools/spec_rows.py` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/spec_rows.py writes the page anew"
