"""`tools/structure`: the figures of how the packages are built, on a small house that is built for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from structure import main as tool  # noqa: E402
from structure.budgets import BUDGETS, FIGURES, WALKED, Budget, beyond, lines_of, over_budget  # noqa: E402
from structure.density import figures_of  # noqa: E402
from structure.sources import House  # noqa: E402
from structure.walk import returns  # noqa: E402

FILES = {
    "packages/flatparam-core/src/flatparam_core/__init__.py": "from flatparam_core.one import One\n",
    "packages/flatparam-core/src/flatparam_core/one.py": """
from typing import TYPE_CHECKING
import attrs, torch
if TYPE_CHECKING:
    from flatparam_core.two import Two

@attrs.define
class One:
    "Whatever it is."
    a: int
    "What it counts."
    b: str = ""
    c = 3
    def use(self):
        self.a = torch._C._nothing()
""",
    "packages/flatparam-core/src/flatparam_core/two.py": """
from .one import One
from .sub import three
class Two:
    "What is used."
    def use(self, one: One):
        "What it does with one."
        text = "What is no docstring."
        one.a, self.x = 1, 2
        one.b += "x"
        one.use()
""",
    "packages/flatparam-core/src/flatparam_core/sub/__init__.py": "",
    "packages/flatparam-core/src/flatparam_core/sub/three.py": "import torch\ntorch._foreach_add_\ntorch.nn.__doc__\n",
}


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House.of(tmp_path)


def test_circles_count_what_is_only_typed(house: House) -> None:
    """An import under `TYPE_CHECKING` closes a circle, but one of another package does not; nor does an `__init__`."""
    assert house.circles() == [["flatparam_core.one", "flatparam_core.two"]]


def test_folders_imports_and_fields(house: House) -> None:
    """Modules of the widest folder, imports of the module that has most, and fields as they are written."""
    assert house.widest_folder() == (2, "flatparam_core")
    assert house.imports_at_percentile(99) == 4
    assert house.fields("One") == 2
    with pytest.raises(ValueError, match="no class 'Three'"):
        house.fields("Three")


def test_who_writes_attributes(house: House) -> None:
    """Assignments from other files, in tuples and in place too; not those of the class itself."""
    assert house.written_from_outside("One", ("one",)) == {
        "a": ["flatparam_core.two"],
        "b": ["flatparam_core.two"],
    }


def test_private_names_of_torch(house: House) -> None:
    """`torch._C` is one; `_foreach_` functions, which torch documents, and names of Python are not."""
    assert house.files_with_private_names_of_torch("flatparam_core") == ["flatparam_core.one"]


def test_docstrings_that_begin_with_a_word(house: House) -> None:
    """Docstrings of classes, functions and fields count, by their first word; other strings do not."""
    assert house.docstrings_that_begin_with("What") == {"flatparam_core.one": 1, "flatparam_core.two": 2}


def test_returns() -> None:
    """How often a way comes back to a file that it has left."""
    a, b, c = (Path(name) for name in "abc")
    assert returns([a, b, c]) == 0
    assert returns([a, b, a, c, b]) == 2


def test_lines_beyond_a_budget(house: House) -> None:
    """A package with a line more than its budget is named, with both figures; one with as many is not."""
    lines = sum(text.count("\n") for text in FILES.values())
    assert lines_of(house) == {"flatparam-core": lines}
    assert over_budget(house, {"flatparam-core": Budget(lines, 0)}) == []
    (told,) = over_budget(house, {"flatparam-core": Budget(lines - 1, 0)})
    assert told.startswith(f"flatparam-core has {lines} lines, and its budget is {lines - 1}: remove as many")
    (told,) = over_budget(house, {})
    assert told.startswith(f"flatparam-core has {lines} lines and no budget")


def test_no_package_is_over_its_budget() -> None:
    """Each package of this checkout has a budget, and keeps to it."""
    assert over_budget(House.of(ROOT)) == []
    assert lines_of(House.of(ROOT)).keys() == BUDGETS.keys()


def test_the_build_fails_beyond_a_budget(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--budgets` prints the lines and returns 1 if there are too many, as without it, which `nox -s layers` calls."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "beyond", lambda figures: [])
    assert tool.main(["--budgets"]) == 0
    long = tmp_path / "packages/flatparam-core/src/flatparam_core/long.py"
    long.write_text("\n" * BUDGETS["flatparam-core"].most)
    assert tool.main(["--budgets"]) == 1
    assert "flatparam-core has 5," in capsys.readouterr().out


def test_a_figure_beyond_its_budget(house: House, tmp_path: Path) -> None:
    """The figures of a small house are what they are, and one that is more than its budget is named with both."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("x" * 121 + f"\n| {'y' * 130} |\n* `{'z' * 120}`\n* `z` {'z' * 120}\n")
    found = figures_of(house, tmp_path)
    assert found["files"] == len(FILES)
    assert found["files under 100 lines"] == len(FILES)
    assert found["function docstrings without a verb"] == 1
    assert found["lines of docs over 120 columns"] == 2
    assert found.keys() == FIGURES.keys()
    as_it_is = {name: Budget(figure, 0) for name, figure in found.items()}
    assert beyond(found, as_it_is) == []
    (told,) = beyond(found, {**as_it_is, "files": Budget(len(FILES) - 1, 0)})
    assert told.startswith(f"files: expected at most {len(FILES) - 1}, found {len(FILES)}")


def test_a_base_class_with_one_subclass(tmp_path: Path) -> None:
    """One is counted, unless it is public, abstract, or a different package has the subclass."""
    files = {
        "flatparam-core/src/flatparam_core/__init__.py": "from .one import B\n__all__ = ['B']\n",
        "flatparam-core/src/flatparam_core/one.py": """
class A: pass
class B(A): pass
class C(B): pass
class D(ABC): pass
class E(D): pass
class F: pass
""",
        "flatparam-comm/src/flatparam_comm/two.py": "class G(one.F): pass\n",
    }
    for name, text in files.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "docs").mkdir()
    counted = "our base classes with one subclass"
    assert figures_of(House.of(tmp_path), tmp_path)[counted] == 1
    path.write_text("class G(one.F): pass\nclass H(G): pass\n")
    assert figures_of(House.of(tmp_path), tmp_path)[counted] == 2


@pytest.mark.long  # and `nox -s layers`
def test_no_figure_is_beyond_its_budget() -> None:
    """The sources of this checkout keep to the budget of each figure."""
    assert beyond(figures_of(House.of(ROOT), ROOT)) == []


@pytest.mark.long  # and `nox -s layers`
def test_the_tables() -> None:
    """The tool prints a row for each budget, of this checkout, and none is exceeded."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "structure")], capture_output=True, text=True, check=True
    )
    rows = dict(line.strip("| ").split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| "))
    assert rows.keys() - {"package", "figure", "---"} == {*BUDGETS, *FIGURES, *WALKED}
    assert int(rows["files of a step"]) > 0
