"""The walls of this layer."""

import ast
from pathlib import Path

import flatparam_core
import flatparam_core.testing

SOURCES = sorted(Path(flatparam_core.__file__).parent.rglob("*.py"))


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_never_imports_torch_distributed() -> None:
    """No module of the core imports torch.distributed, nor reaches for it through ``torch``."""
    assert len(SOURCES) > 10
    for path in SOURCES:
        assert not [name for name in imported_by(path) if name.startswith("torch.distributed")], path.name
        reached = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
        assert not reached, path.name


def test_imports_nothing_of_the_layers_above() -> None:
    """The core knows no other package of the project."""
    for path in SOURCES:
        ours = {name.partition(".")[0] for name in imported_by(path) if name.startswith("flatparam")}
        assert ours <= {"flatparam_core"}, path.name


def test_public_names_exist_once() -> None:
    """Each public name is there, is listed once, and every module's own list is true."""
    assert len(set(flatparam_core.__all__)) == len(flatparam_core.__all__)
    assert [name for name in flatparam_core.__all__ if not hasattr(flatparam_core, name)] == []
    assert flatparam_core.testing.__all__ == sorted(flatparam_core.testing.__all__)
