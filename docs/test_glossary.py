"""One word means one thing: the glossary names classes that exist, and no two classes have one name."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from house import TOOLS

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<word>[^|]+) \| (?P<classes>[^|]*) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)


@cache
def homes() -> dict[str, list[str]]:
    """Return the files of the packages that define each class at their top level, by its name."""
    found = defaultdict(list)
    for path in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return dict(found)


def rows() -> list[tuple[str, list[str]]]:
    """Return the words of the glossary, each with the classes that it is the name of."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = [(match["word"], re.findall(r"`(\w+)`", match["classes"])) for match in ROW.finditer(page)]
    return [(word, classes) for word, classes in found if word not in ("word", "---")]


def test_no_two_classes_have_one_name() -> None:
    """A name says which class of the layers and add-ons is meant, wherever it is read; tools know nothing of these."""
    tools = tuple(f"packages/{tool}/" for tool in TOOLS)
    own = {name: [file for file in files if not file.startswith(tools)] for name, files in homes().items()}
    assert {name: files for name, files in own.items() if len(files) > 1} == {}


def test_every_class_of_the_glossary_exists() -> None:
    """A class that the glossary names is defined in one of the packages."""
    assert [name for _, classes in rows() for name in classes if name not in homes()] == []


def test_a_word_stands_once() -> None:
    """A word is explained in one row, and a class is that of one word."""
    words = [word for word, _ in rows()]
    classes = [name for _, names in rows() for name in names]
    assert len(words) > 30
    assert sorted(words) == sorted(set(words))
    assert sorted(classes) == sorted(set(classes))
