"""The site shows no line of code cut, no plot of other results, and no base that a reader cannot look up."""

import functools
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from bench.plots import digest, pictures
from each_row import each_row

from docs.test_reference import NOT_IMPORTED

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FENCE = re.compile(r"^ *(?:`{3,}|~{3,})")
LONGEST_CODE_LINE = 110
"""The characters of a line of code that fit at 1280 pixels: 114 in the measured font, and four to spare for others."""
PLOTS = sorted(pictures(json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))).items())
REFERENCE = sorted((DOCS / "reference").glob("flatparam*.md"))
DOCUMENTED = re.compile(r"^::: (?P<name>[\w.]+)$(?P<options>(?:\n {4}.*)*)", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages of the site, and the READMEs, whose blocks are as wide."""
    return sorted([*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "packages").glob("*/README.md")])


def too_long(text: str) -> list[str]:
    """Return the lines in the fenced blocks of a Markdown text that do not fit."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_code = not is_code
        elif is_code and len(line) > LONGEST_CODE_LINE:
            found.append(f"line {number} has {len(line)} characters: {line}")
    return found


@each_row("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_code_is_cut(page: Path) -> None:
    """Every line of code of a page fits into the page."""
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_long_code_is_found_and_long_prose_is_not() -> None:
    """Only a line inside a fence counts."""
    line = "x" * (LONGEST_CODE_LINE + 1)
    assert too_long(f"{line}\n```\n{line}\n{line[1:]}\n```\n{line}\n") == [f"line 3 has {len(line)} characters: {line}"]


@pytest.mark.parametrize(("name", "shown"), PLOTS, ids=[name for name, _ in PLOTS])
def test_plots_are_of_the_committed_results(name: str, shown: object) -> None:
    """A plot shows docs/performance.json as it is; `python tools/bench page` draws it, if matplotlib is installed."""
    assert isinstance(shown, dict)
    text = (DOCS / name).read_text(encoding="utf-8")
    assert f"results {digest(shown)}</dc:description>" in text


@pytest.mark.parametrize("name", ["performance-time.svg", "performance-memory.svg", "pictures/layers.svg"])
def test_the_first_page_has_the_pictures(name: str) -> None:
    """The layers, the step time and the memory stand on the first page, before any table."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert -1 < text.find(f"]({name})") < text.find("\n| ")


def test_the_site_has_both_schemes() -> None:
    """A reader can switch between a light and a dark scheme."""
    text = (ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8")
    palette = yaml.safe_load(text)["theme"]["palette"]
    assert [(scheme["scheme"], bool(scheme["toggle"])) for scheme in palette] == [
        ("default", True),
        ("slate", True),
    ]


@functools.cache
def documented(page: Path) -> list[tuple[str, object, str]]:
    """Return the names that a page of the reference documents, what has them, and their options."""
    found = []
    for match in DOCUMENTED.finditer(page.read_text(encoding="utf-8")):
        module, _, name = match["name"].rpartition(".")
        if module == NOT_IMPORTED:
            continue
        found.append((match["name"], getattr(importlib.import_module(module), name), match["options"]))
    return found


def is_ours_alone(base: type) -> bool:
    """Return whether a class is private, or one of ours that no page of the reference documents."""
    if base.__name__.startswith("_"):
        return True
    known = [shown for page in REFERENCE for _, shown, _ in documented(page)]
    return base.__module__.startswith("flatparam") and not any(base is shown for shown in known)


@each_row("page", REFERENCE, ids=lambda page: page.stem)
def test_no_class_leaks_a_base_of_ours(page: Path) -> None:
    """A class whose base is private, or documented nowhere, is shown without its bases."""
    leaking = [
        name
        for name, shown, options in documented(page)
        if isinstance(shown, type) and any(map(is_ours_alone, shown.__bases__)) and "show_bases: false" not in options
    ]
    assert leaking == []
