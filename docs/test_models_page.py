"""The page of real models is that of the results of `nox -s run -- models`."""

import json

from models_page import COLUMNS, PAGE, RESULTS, page


def test_the_page_is_that_of_the_results() -> None:
    """Nothing between the markers is edited by hand, and every model has a number in the columns that all have."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert page(found, text) == text, "python tools/models_page.py writes it anew"
    for model in found["models"].values():
        assert all(model[column] > 0 for column in COLUMNS if column != "generate")
