"""The page of complaints is that of the rows, their programs and the results of `nox -s run -- complaints`."""

import json

from integration_tests.complaints.page import PAGE, RESULTS, page
from integration_tests.complaints.rows import load_all


def test_the_page_is_that_of_the_rows() -> None:
    """Every row is on the page with its program, nothing else is, and nothing between the markers is edited by hand."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = load_all()
    assert {report: [*of_sides] for report, of_sides in found["rows"].items()} == {
        report: [*row.sides] for report, row in rows.items()
    }
    text = PAGE.read_text(encoding="utf-8")
    assert page(found, text) == text, "python -m integration_tests.complaints writes it anew"
