"""How dense the sources are, how wide their surface is, and how they read: figures, from the sources alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final

from house import LAYERS

from structure.sources import House, Module

__all__ = ["figures_of"]

_SMALL: Final = 100
#: A function docstring should begin with a verb.
_NOT_A_VERB: Final = re.compile(
    "(The|A|An|What|How|Those|Whether|Which|Who|When|Where|That|These|This|Each|Every|All) "
)
_COLUMNS: Final = 120
_SHORTEST_MESSAGE: Final = 20


def figures_of(house: House, root: Path) -> dict[str, int]:
    """Return each figure by its name: `structure.budgets.FIGURES` has the most that it may be."""
    files = [module.path for module in house.modules]
    names = Counter(path.name for path in files if path.name != "__init__.py")
    lengths = [node.end_lineno - node.lineno + 1 for node in _functions(house)]  # type: ignore[operator]
    messages = list(_messages(house))
    public = _public_names(house)
    return {
        "files": len(files),
        f"files under {_SMALL} lines": sum(module.lines < _SMALL for module in house.modules),
        "lines": sum(module.lines for module in house.modules),
        "lines of imports and `__all__`, per mille": _import_share(house),
        "file names that occur twice or more": sum(count > 1 for count in names.values()),
        "lines of the median function": round(median(lengths)) if lengths else 0,
        "lines of the longest function": max(lengths, default=0),
        "public names of the layers": sum(len(public.get(_module_of(layer), ())) for layer in LAYERS),
        "public names that layers pass on": sum(
            _passed_on(house, layer, public) for layer in LAYERS if layer != "flatparam"
        ),
        'docstrings "See `X`"': sum(text.startswith("See `") for text in _docstrings(house)),
        "function docstrings without a verb": sum(_NOT_A_VERB.match(text) is not None for text in _docstrings(house)),
        'messages with "is no"': sum(re.search(" is no (?!longer)", text) is not None for text in messages),
        f"messages under {_SHORTEST_MESSAGE} characters": sum(len(text) < _SHORTEST_MESSAGE for text in messages),
        f"lines of docs over {_COLUMNS} columns": _long_lines(root / "docs"),
        "fields of BackwardPass": _fields(house, "BackwardPass"),
        "fields of UnitTree": _fields(house, "UnitTree"),
        "facts reachable from Unit": _reachable(house, "Unit"),
        "collections of a backward pass by unit": _by_unit(house),
        "calls that free full parameters": _calls(house, "flatparam_runtime", "reshard"),
        "our base classes with one subclass": len(_only_children(house)),
    }


def _module_of(package: str) -> str:
    return package.replace("-", "_")


def _functions(house: House) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for module in house.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _docstrings(house: House) -> Iterator[str]:
    return filter(None, map(ast.get_docstring, _functions(house)))


def _import_share(house: House) -> int:
    """Return how many of a thousand lines are imports, or names of an `__all__`."""
    of_imports = 0
    for module in house.modules:
        for node in ast.walk(module.tree):
            is_all = isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node)[:10]
            if isinstance(node, ast.stmt) and (is_all or isinstance(node, ast.Import | ast.ImportFrom)):
                of_imports += (node.end_lineno or node.lineno) - node.lineno + 1
    return round(1000 * of_imports / max(1, sum(module.lines for module in house.modules)))


def _public_names(house: House) -> Mapping[str, set[str]]:
    """Return the names in the `__all__` of each module that has one."""
    found: dict[str, set[str]] = {}
    for module in house.modules:
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                constants = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                found[module.name] = {each.value for each in constants if isinstance(each.value, str)}
    return found


def _passed_on(house: House, layer: str, public: Mapping[str, set[str]]) -> int:
    """Count the public names of a layer that its `__init__` takes from the layer beneath."""
    name = _module_of(layer)
    beneath = {_module_of(each) for each in LAYERS} - {name}
    nodes = (node for module in house.modules if module.name == name for node in module.tree.body)
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in beneath)
    return len({each.name for node in found for each in node.names} & public.get(name, set()))


def _messages(house: House) -> Iterator[str]:
    """Yield the texts of the errors that are raised, if they are written where they are raised, and say all there."""
    for module in house.modules:
        for node in ast.walk(module.tree):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith("Error"):
                text = _text(call.args[-1])
                if text is not None and not _SAYS_IT_ELSEWHERE.fullmatch(text):
                    yield text


#: A message that only joins others.
_SAYS_IT_ELSEWHERE: Final = re.compile(r"(rank )?\.\.\.(: (damaged: )?\.\.\.)+|\.*step\(\): \.\.\.")


def _text(node: ast.expr) -> str | None:
    """Return the text of a literal, with an ellipsis in the place of each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) or "..." for each in node.values)
    return None


def _long_lines(docs: Path) -> int:
    """Return how many lines of prose are too long; tables, links and names cannot be wrapped."""
    count = 0
    for path in docs.rglob("*.md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        count += sum(len(line) > _COLUMNS and _CANNOT_BE_WRAPPED.match(line) is None for line in lines)
    return count


#: A line of a table, a picture, a link, a tag or a heading, or an item of a list that is one link or one name.
_CANNOT_BE_WRAPPED: Final = re.compile(r"\s*(\||!\[|\[|<|#|\* (\[[^]]*\]\([^)]*\)|`[^`]*`)$)")


def _class(house: House, name: str) -> ast.ClassDef | None:
    for module in house.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
    return None


def _fields(house: House, name: str) -> int:
    node = _class(house, name)
    return sum(isinstance(each, ast.AnnAssign) for each in node.body) if node else 0


def _reachable(house: House, name: str) -> int:
    """Return how many fields a class has, with those of the objects that it alone has: whose class has a default."""
    node = _class(house, name)
    own = [each for each in node.body if isinstance(each, ast.AnnAssign)] if node else []
    kinds = [ast.unparse(each.annotation) for each in own]
    return len(own) + sum(_fields(house, kind) for kind in kinds)


def _by_unit(house: House) -> int:
    node = _class(house, "BackwardPass")
    kinds = [ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)] if node else []
    return sum(kind.startswith(("dict[Unit,", "set[Unit")) for kind in kinds)


def _calls(house: House, package: str, method: str) -> int:
    """Return how many calls of a method there are in a package, but for its own handles' (`handle.reshard()`)."""
    count = 0
    for module in house.modules:
        if module.name.partition(".")[0] == package:
            count += len(re.findall(rf"(?<!handle)\.{method}\(", _code(module)))
    return count


def _code(module: Module) -> str:
    """Return the code of a module, without docstrings and comments."""
    return ast.unparse(module.tree)


def _only_children(house: House) -> list[str]:
    """Return our classes of which exactly one class is a subclass, in the same package.

    Protocols, abstract classes, exceptions and the public classes of a package are meant for others.
    """
    children: dict[str, list[str]] = {}
    own: dict[str, str] = {}
    public = _public_names(house)
    for module in house.modules:
        package = module.name.partition(".")[0]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                for name in names:
                    children.setdefault(name, []).append(package)
                is_for_others = not {"Protocol", "ABC", "Exception", "Enum"}.isdisjoint(names)
                if not (is_for_others or node.name.endswith("Error") or node.name in public.get(package, ())):
                    own[node.name] = package
    return sorted(name for name, package in own.items() if children.get(name) == [package])
