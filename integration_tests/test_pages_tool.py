"""tools/pages.py: tables, parts of pages between markers, and the commands that write pages."""

import subprocess
import sys
from pathlib import Path

import pages
import pytest
from each_row import each_row


def test_a_table_has_numbers_to_the_right() -> None:
    """The first column is text and the others are numbers, unless the caller says what stands beneath the head."""
    lines = [["", "a", "b"], ["x", "1", "2"]]
    assert pages.table(lines) == "|  | a | b |\n| --- | ---: | ---: |\n| x | 1 | 2 |"
    assert pages.table(lines, ["---"]).splitlines()[1] == "| --- | --- | --- |"
    assert pages.table(iter(lines), ("--:", "---")).splitlines()[1] == "| --: | --- | --- |"


def test_prose_is_wrapped_and_nothing_else() -> None:
    """A long line becomes several of at most 120 columns, an item's indented; tables, code and long names stay."""
    words, name = " ".join(["word"] * 40), "n" * 130
    kept = [f"| {words} |", "```", words, "```", f"# {words}", f"![{words}](a.svg)", "short", "", name]
    assert pages.wrapped("\n".join(kept)) == "\n".join(kept)
    for head, inside in (("", ""), ("* ", "  "), ("  1. ", "     ")):
        first, *others = pages.wrapped(f"{head}{words}").split("\n")
        assert first.startswith(f"{head}word word")
        assert 115 < len(first) <= 120
        assert all(line.startswith(f"{inside}word") and len(line) <= 120 for line in others)
        assert " ".join([first.removeprefix(head), *map(str.strip, others)]) == words


def test_a_part_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    """What is between the markers of a part is new, word for word, and what is around it stays."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin one -->\nold\n<!-- end one -->\nb\n<!-- x -->old<!-- y -->\nc\n")
    pages.fill(page, {"one": r"new \1", ("<!-- x -->", "<!-- y -->"): "new"}, gap="\n")
    parts = "<!-- begin one -->\nnew \\1\n<!-- end one -->\nb\n<!-- x -->\nnew\n<!-- y -->"
    assert page.read_text() == f"a\n{parts}\nc\n"


def test_a_page_without_the_markers_is_refused(tmp_path: Path) -> None:
    """The error names the markers, and the page stays as it was, the parts that it has, too."""
    page = tmp_path / "page.md"
    page.write_text("<!-- begin one --><!-- end one -->")
    with pytest.raises(LookupError, match="expected the markers <!-- begin two --> and <!-- end two -->"):
        pages.fill(page, {"one": "new", "two": "new"})
    assert page.read_text() == "<!-- begin one --><!-- end one -->"


@each_row("name", pages.PAGES)
def test_the_command_of_a_page_exists(name: str) -> None:
    """Each page of the list is written by a tool that is there."""
    first, *rest = pages.PAGES[name]
    path = pages.ROOT / (rest[0].replace(".", "/") if first == "-m" else first)
    assert path.is_file() or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_pages_are_chosen_by_name() -> None:
    """Without names the command lists them, and a name that it does not know is refused before anything is written."""
    command = [sys.executable, str(pages.ROOT / "tools" / "pages.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(pages.PAGES)
    refused = subprocess.run([*command, "layouts", "layout"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stdout.strip().endswith("found layout")
