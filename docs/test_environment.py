"""docs/reference/environment.md has every environment variable that the packages read, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|CXX|RANK|PYTHONPATH")


def texts(source: Path) -> Iterator[str]:
    """Yield the literal texts of a file that reads the environment, but for its docstrings."""
    text = source.read_text(encoding="utf-8")
    if "environ" not in text:
        return
    tree = ast.parse(text)
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_every_variable_is_on_the_page() -> None:
    """A name in capitals, in a module that reads the environment, is a variable: each stands on the page."""
    sources = sorted((ROOT / "packages").glob("*/src/**/*.py"))
    read = {text for source in sources for text in texts(source) if NAME.fullmatch(text)}
    page = PAGE.read_text(encoding="utf-8")
    told = {name for name in re.findall(r"`([A-Z][A-Z0-9_]+)(?:=0)?`", page) if name != "FLATPARAM_RELAY_"}
    assert {"FLATPARAM_TRACE", "FLATPARAM_RELAY", "CXX"} <= read
    assert sorted(told) == sorted(read)
