"""What can be read from the sources without running them."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from attrs import define, field, frozen
from house import PACKAGES


@define(slots=False)
class Module:
    """One Python file of a package."""

    path: Path
    name: str
    """Dotted, as it is imported; that of the folder for its `__init__`."""

    @cached_property
    def text(self) -> str:
        """What is in the file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def docstrings(self) -> Iterator[str]:
        """The docstrings of the module, of its classes and functions, and those below fields and constants."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for each in node.body:
                    value = each.value if isinstance(each, ast.Expr) else None
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.value

    @cached_property
    def imported(self) -> list[str]:
        """Each module that is named in an import, once, those under `TYPE_CHECKING` and inside functions too."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                found.append(".".join([*above, *([node.module] if node.module else [])]))
        return list(dict.fromkeys(found))


@frozen
class House:
    """All modules of the packages."""

    modules: Sequence[Module]
    by_name: Mapping[str, Module] = field(init=False)

    @by_name.default
    def _index(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}

    @classmethod
    def of(cls, root: Path) -> House:
        """The packages below `root`, a checkout."""
        found = []
        for package in PACKAGES:
            source = root / "packages" / package / "src"
            for path in sorted(source.rglob("*.py")):
                parts = path.relative_to(source).with_suffix("").parts
                found.append(Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
        return cls(found)

    def imports(self, module: Module) -> Iterator[str]:
        """The modules of the packages that `module` imports, or imports names from."""
        package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
        promised = _promised(module)
        for node in ast.walk(module.tree):
            if node in promised:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.by_name)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                inside = [f"{source}.{alias.name}" for alias in node.names]
                yield from (name for name in inside if name in self.by_name)
                if source in self.by_name and any(name not in self.by_name for name in inside):
                    yield source

    def circles(self) -> list[list[str]]:
        """The sets of modules of which each imports each other, by whatever way; a package's `__init__` only counts if
        a module beneath it is imported by a name of its own."""
        edges = {module.name: set(self.imports(module)) - {module.name} for module in self.modules}
        return [sorted(component) for component in _components(edges) if len(component) > 1]

    def widest_folder(self) -> tuple[int, str]:
        """How many modules the folder with most of them has, without its `__init__`; and its name."""
        folders = Counter(module.path.parent for module in self.modules if module.path.name != "__init__.py")
        folder, count = folders.most_common(1)[0]
        return count, folder.name

    def imports_at_percentile(self, percent: int) -> int:
        """At most so many modules are imported by `percent` of all modules, of ours and of others."""
        counts = sorted(len(module.imported) for module in self.modules)
        return counts[min(len(counts) - 1, len(counts) * percent // 100)]

    def docstrings_that_begin_with(self, word: str) -> dict[str, int]:
        """How many docstrings of each module begin with `word`, as in "What it returns."; of those that have any."""
        found = {module.name: sum(text.split()[:1] == [word] for text in module.docstrings) for module in self.modules}
        return {name: count for name, count in found.items() if count}

    def fields(self, class_name: str) -> int:
        """How many fields a class of attrs has, as they are written in it."""
        for module in self.modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef) and node.name == class_name:
                    return sum(isinstance(each, ast.AnnAssign) for each in node.body)
        raise ValueError(f"there is no class {class_name!r}")

    def written_from_outside(self, class_name: str, variables: Iterable[str]) -> dict[str, list[str]]:
        """The attributes of a class that files in other folders assign to, and these files.

        Args:
            variables: the names under which objects of the class go.
        """
        home = next(
            module.path.parent
            for module in self.modules
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef) and node.name == class_name
        )
        own = {module.path for module in self.modules if f"class {class_name}" in module.text}
        names = set(variables)
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.modules:
            if module.path in own or (module.path.parent == home and home.name.replace("_", "-") not in PACKAGES):
                continue
            for target in _targets(module.tree):
                if isinstance(target.value, ast.Name) and target.value.id in names:
                    found[target.attr].append(module.name)
        return {name: sorted({*files}) for name, files in sorted(found.items())}

    def files_with_private_names_of_torch(self, package: str) -> list[str]:
        """The modules of a package that reach for a name of torch that begins with an underscore."""
        return [
            module.name
            for module in self.modules
            if module.name.split(".")[0] == package and any(map(_is_private_name_of_torch, _dotted(module)))
        ]


def _promised(module: Module) -> set[ast.AST]:
    """Return the imports under `TYPE_CHECKING` of other packages: of add-ons, whose names a layer promises."""
    own = module.name.partition(".")[0]
    return {
        node
        for block in ast.walk(module.tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] != own
    }


def _targets(tree: ast.Module) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (one for one in each if isinstance(one, ast.Attribute))


def _dotted(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def _is_private_name_of_torch(name: str) -> bool:
    parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts[1:])
    return parts[0] == "torch" and private


def _components(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components, by Tarjan's algorithm (SIAM Journal on Computing 1, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for start in edges:
        if start in number:
            continue
        work = [(start, iter(sorted(edges[start])))]
        number[start] = low[start] = len(number)
        stack.append(start)
        while work:
            node, following = work[-1]
            for other in following:
                if other not in number:
                    number[other] = low[other] = len(number)
                    stack.append(other)
                    work.append((other, iter(sorted(edges[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], number[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    place = stack.index(node)
                    yield stack[place:]
                    del stack[place:]
