"""Functions of libraries that are not installed, cut out of their wheels.

An RL trainer needs ray, vllm and a GPU, and its functions for FSDP1 need torch. `nox -s clients` downloads the wheels, and
`FLATPARAM_CLIENT_WHEELS` is the folder that has them.
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["functions_of", "module_of", "wheel_of"]


def wheel_of(project: str) -> Path | None:
    """The wheel of `project`, if it was downloaded."""
    folder = os.environ.get("FLATPARAM_CLIENT_WHEELS")
    return next(iter(sorted(Path(folder).glob(f"{project}-*.whl"))), None) if folder else None


def functions_of(wheel: Path, file: str, names: Collection[str], **others: Any) -> SimpleNamespace:
    """The functions and classes `names` of a file in a wheel, as they are there; see `module_of`."""
    module = module_of(wheel, file, names, **others)
    return SimpleNamespace(**{name: getattr(module, name) for name in names})


def module_of(wheel: Path, file: str, names: Collection[str], **others: Any) -> ModuleType:
    """A module with the name of a file in a wheel, and with those of its functions and classes that are in `names`.

    What the file imports is imported if it is installed; `others` are names in place of what is not.
    """
    with zipfile.ZipFile(wheel) as opened:
        tree = ast.parse(opened.read(file).decode())
    module = ModuleType(file.removesuffix(".py").replace("/", "."))
    wanted, namespace = set(names), vars(module)
    namespace.update(others)
    defined: list[ast.stmt] = []
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import | ast.ImportFrom) and _stands_outside(statement, tree):
            _try(statement, namespace, others)
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name in wanted:
            defined.append(each)
            wanted.discard(each.name)
    assert not wanted, f"{wheel.name}: {file} has no {sorted(wanted)}"
    # Annotations name what is not installed.
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *defined], []), f"{wheel.name}/{file}", "exec"), namespace)
    return module


def _stands_outside(statement: ast.stmt, tree: ast.Module) -> bool:
    """Whether an import is not inside a function; it can be inside an `if`."""
    return not any(
        isinstance(each, ast.FunctionDef | ast.ClassDef) and each.lineno <= statement.lineno <= (each.end_lineno or 0)
        for each in tree.body
    )


def _try(statement: ast.stmt, namespace: dict[str, Any], others: dict[str, Any]) -> None:
    found = dict(namespace)
    try:
        exec(compile(ast.Module([statement], []), "imports", "exec"), found)
    except ImportError:
        return
    namespace.update({**found, **others})
