"""The table of behaviours names tests that exist, and its page is the table's."""

from collections import Counter

from spec_rows import PAGE, ids_of_tests, page, rows

ROWS = rows()
TESTS = frozenset(ids_of_tests())


def test_no_row_is_listed_twice() -> None:
    """A row belongs to one section, and a row's title and each of its tests are said once."""
    for said in ([row.id for row in ROWS], [row.title for row in ROWS], *(row.tests for row in ROWS)):
        assert [value for value, count in Counter(said).items() if count > 1] == []


def test_named_tests_exist() -> None:
    """Every test that a row names is a function in its file."""
    missing = {row.id: [test for test in row.tests if test not in TESTS] for row in ROWS}
    assert {row: tests for row, tests in missing.items() if tests} == {}


def test_status_says_what_there_is() -> None:
    """A row that is done is checked by a test; of any other the table says what it lacks."""
    assert {row.status for row in ROWS} <= {"done", "GPU", "partly", "missing"}
    done = [row for row in ROWS if row.status in ("done", "GPU")]
    assert [row.id for row in ROWS if bool(row.lacks) == (row in done)] == []
    assert [row.id for row in done if not row.tests] == []


def test_page_is_that_of_the_table() -> None:
    """The page has what the table says; `python tools/spec_rows.py` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/spec_rows.py writes the page anew"
