"""Check the walls of the house: `python tools/check_layers.py [ROOT]`.

What import-linter cannot see (it checks the directions): by which *names* a layer uses the one beneath it, which
submodules of torch it may touch, whether it declares what it imports, and the shape of each package. The rules are the
functions `check_*` below; each returns its findings as `file:line: sentence`. Reads the sources and imports none of
them; needs only the standard library (and tomli on Python 3.10).
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from house import ADDONS, LAYERS, PACKAGES, TOOLS, read_toml, tested_with

# The public names of a package are the `__all__` of itself and of these modules in it.
PUBLIC_SUBMODULES: Final = ("testing",)
# Modules whose public names add-ons and tools may use, too: their `__all__`, or what is defined there. Comm
# may use the worlds of simdev, and the wrapper's first two are public.
OPEN_TO_ADDONS: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-simdev": ("worlds",),
    "flatparam-files": (
        "checkpoint.commit",
        "checkpoint.directory",
        "checkpoint.fields",
        "checkpoint.lock",
        "checkpoint.manifest",
        "checkpoint.rank_part",
        "checkpoint.reader",
        "checkpoint.values",
        "command",
        "disk.limits",
        "disk.progress",
        "disk.source",
        "disk.system",
        "formats.hugging_face",
        "formats.output",
        "formats.stored_tensors",
        "formats.whole_sources",
    ),
    "flatparam-comm": (
        "checks",
        "collectives",
        "errors",
        "guarding",
        "hosts",
        "process_group.c10d",
        "process_group.engine",
        "process_group.groups",
        "topology.transports",
        "transfer.gather",
        "transfer.reduction",
    ),
    "flatparam-runtime": (
        "agreement.fingerprint",
        "optimizers.torch_optimizers",
        "passes.record",
    ),
    "flatparam-state": (
        "at_rest",
        "forms.chunker",
        "forms.deferred",
        "forms.tiling",
        "model.collect",
        "model.load",
        "model_tensors",
        "optimizer",
        "optimizer.first_state",
        "optimizer.held",
        "places",
        "ranks",
    ),
    "flatparam": (
        "api",
        "command",
        "addons",
        "compat",
        "checkpoint.state_dict",
        "fully_sharded_data_parallel",
        "in_place.module",
        "debug_log",
        "resolving.arguments",
        "sharding.extensions",
        "state.load_hooks",
        "state.optimizer",
        "state.form_settings",
        "wrap",
        "wrapper.interior",
        "wrapper.refusing",
    ),
    "flatparam-clients": ("older_functions",),
}
# In no `__all__`, as in torch, and open all the same.
OPEN_NAMES: Final = {"flatparam.wrap._Policy": "the base class of FSDP1's policies"}
CONTENTS: Final = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "src", "tests"}
FREE_OF_DISTRIBUTED: Final = "flatparam-core"
TORCH_FSDP: Final = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
# The places that may know torch's own FSDP: one makes torch's names ours, the other has it checked on demand.
COMPATIBILITY: Final = {
    "flatparam-clients": ("installing.py", "names.py"),
    "flatparam-certify": ("engines.py",),
}
# Those of FSDP1's private modules.
FACADES: Final = "flatparam_clients.private"
# What passes names of the layer beneath on: those to which its own signatures lead.
PASSING_ON: Final = ("flatparam-comm", "flatparam-runtime", "flatparam-state")
# The layers that promise names of add-ons or tools, which they import under `if TYPE_CHECKING:` alone.
PROMISED: Final = {
    "flatparam": tuple(ADDONS),
    "flatparam-comm": ("flatparam-guard", "flatparam-onehost", "flatparam-simdev"),
    "flatparam-runtime": ("flatparam-optim",),
    "flatparam-state": ("flatparam-checkpoint", "flatparam-files", "flatparam-publish"),
}
# Passed on without a signature that leads to it.
ALSO_PASSED_ON: Final = {
    "each_module": "walks modules as the core does, where torch's own generator is too slow",
    "FlatParamError": "methods of flat parameters raise it",
    "module_behind": "a layer finds the module behind a seam by it",
    "names_of": "a package promises names of add-ons by it",
    "SingleCollectives": "state without ranks is that of a world of one",
    "warn_caller": "warnings of every layer name the program's line",
    "Transitions": "the runtime's phases are a table of the same kind as the core's residencies",
}
# Import names that are not the distribution's name with underscores.
DISTRIBUTION_OF: Final = {"attr": "attrs"}


@dataclass(frozen=True)
class Use:
    """One dotted name that a file imports or reaches: `torch.distributed`, `flatparam_core.Span`."""

    name: str
    line: int
    module: str = ""  # of an import: the part of the name that must be a module; empty for an attribute
    level: int = 0  # how many dots a relative import begins with
    star: bool = False
    typing: bool = False  # whether it is under `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    path: Path
    shown: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=self.shown)

    @cached_property
    def uses(self) -> list[Use]:
        """Everything that the file imports, wherever in it, and the attributes it takes of that."""
        return [*_imports(self.tree), *_attributes(self.tree)]


@dataclass(frozen=True)
class Package:
    """One distribution under packages/."""

    path: Path
    root: Path

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return self.path.name

    @property
    def module(self) -> str:
        """The name that is imported."""
        return self.name.replace("-", "_")

    @cached_property
    def sources(self) -> list[Source]:
        """The Python files under src/."""
        files = sorted((self.path / "src").rglob("*.py"))
        return [Source(path, path.relative_to(self.root).as_posix()) for path in files]

    @cached_property
    def project(self) -> dict[str, Any]:
        """The table [project] of pyproject.toml."""
        table: dict[str, Any] = read_toml(self.path / "pyproject.toml")["project"]
        return table

    def public_names(self, submodule: str = "") -> set[str] | None:
        """Return the public names of the package or of one of its modules: its `__all__`, or what a module defines."""
        base = self.path / "src" / self.module / submodule
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.exists():
                tree = ast.parse(path.read_text(encoding="utf-8"))
                return _dunder_all(tree) or (_defined(tree) if path.name != "__init__.py" else None)
        return None


# Reading Python


def _imports(tree: ast.Module) -> Iterator[Use]:
    typing = _nodes_for_typing(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno, alias.name, typing=id(node) in typing)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                base = node.module or ""
                name = base if alias.name == "*" else f"{base}.{alias.name}".lstrip(".")
                yield Use(name, node.lineno, base, node.level, star=alias.name == "*", typing=id(node) in typing)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Use(first.value, node.lineno, first.value)


def _nodes_for_typing(tree: ast.Module) -> set[int]:
    return {id(each) for node in ast.walk(tree) if _is_for_typing(node) for each in ast.walk(node)}


def _is_for_typing(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:` without an else."""
    return isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING") and not node.orelse


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _attributes(tree: ast.Module) -> Iterator[Use]:
    meaning, typing = _names_bound_by_imports(tree), _nodes_for_typing(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            first, _, rest = dotted.partition(".")
            if rest and first in meaning:
                yield Use(f"{meaning[first]}.{rest}", node.lineno, typing=id(node) in typing)


def _names_bound_by_imports(tree: ast.Module) -> dict[str, str]:
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _dunder_all(tree: ast.Module) -> set[str] | None:
    names: set[str] | None = None
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            strings = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)] if value else []
            names = (names or set()) | {text for text in strings if isinstance(text, str)}
    return names


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that a module defines at its top, but for private ones."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def _is_or_is_under(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


# The rules


def check_shape(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """There are the layers, the add-ons and the tools, and each holds the same things and one typed import package."""
    for missing in sorted(PACKAGES.keys() - packages.keys()):
        yield f"packages/{missing} is missing"
    for strange in sorted(packages.keys() - PACKAGES.keys()):
        others = ", ".join((*ADDONS, *TOOLS))
        yield f"packages/{strange} is neither one of the layers {', '.join(LAYERS)} nor an add-on or a tool: {others}"
    for package in packages.values():
        shown = f"packages/{package.name}"
        found = {path.name for path in package.path.iterdir() if not path.name.startswith((".", "__pycache__"))}
        for name in sorted(CONTENTS - found):
            yield f"{shown} lacks {name}"
        for name in sorted(found - CONTENTS):
            yield f"{shown} holds {name}, and only {', '.join(sorted(CONTENTS))} belong there"
        licence, of_all = package.path / "LICENSE", root / "LICENSE"
        if licence.exists() and of_all.exists() and licence.read_bytes() != of_all.read_bytes():
            yield f"{shown}/LICENSE is not the LICENSE of the repository"
        inside = {path.name for path in (package.path / "src").glob("*")} - {"__pycache__"}
        if inside != {package.module}:
            yield f"{shown}/src must hold {package.module} and nothing else; it holds {sorted(inside)}"
        for name in ("__init__.py", "py.typed"):
            if not (package.path / "src" / package.module / name).exists():
                yield f"{shown}/src/{package.module} lacks {name}"


def check_names(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """A layer imports only the layer directly beneath it (the wrapper: all four), and only its public names.

    An add-on imports layers, by their public names and those of the wrapper's modules that are open to add-ons; and no
    other add-on. No layer imports an add-on or a tool, but under `if TYPE_CHECKING:` one of which it promises names.
    """
    by_module = {package.module: package for package in packages.values()}
    for package in packages.values():
        allowed = PACKAGES.get(package.name, ())
        for source in package.sources:
            for use in source.uses:
                top, _, rest = use.name.partition(".")
                other = by_module.get(top)
                if use.level or other is None or other is package:
                    continue
                if use.typing and other.name in PROMISED.get(package.name, ()):
                    yield from _check_public(source, use, other)
                elif other.name not in allowed:
                    may = f"may import {', '.join(allowed)}" if allowed else "may import no other layer"
                    yield f"{source.shown}:{use.line}: {package.name} imports {other.name}, and {may}"
                elif use.star:
                    yield f"{source.shown}:{use.line}: import the names of {use.name} that are used, not *"
                elif rest:
                    yield from _check_public(source, use, other)


def _check_public(source: Source, use: Use, other: Package) -> Iterator[str]:
    submodules = (*PUBLIC_SUBMODULES, *OPEN_TO_ADDONS.get(other.name, ()))
    open_modules = {f"{other.module}.{submodule}": submodule for submodule in submodules}
    if use.name in open_modules or use.name in OPEN_NAMES:
        return
    if use.module not in ("", other.module, *open_modules):
        yield f"{source.shown}:{use.line}: {use.module} is a private module; import from {other.module}"
        return
    where = max(
        (module for module in open_modules if _is_or_is_under(use.name, module)),
        default=other.module,
        key=len,
    )
    if use.name == where:
        return
    public = other.public_names(open_modules.get(where, "").replace(".", "/"))
    name = use.name[len(where) + 1 :].partition(".")[0]
    if public is None:
        yield f"{source.shown}:{use.line}: {where} has no __all__, so {name} is not a public name of it"
    elif name not in public and not (name.startswith("__") and name.endswith("__")):
        yield f"{source.shown}:{use.line}: {name} is not a public name of {where} (it is not in its __all__)"


def check_core_is_free_of_distributed(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """The core never imports or reaches `torch.distributed`."""
    package = packages.get(FREE_OF_DISTRIBUTED)
    for source in package.sources if package else ():
        for use in source.uses:
            if use.level == 0 and _is_or_is_under(use.name, "torch.distributed"):
                yield f"{source.shown}:{use.line}: {FREE_OF_DISTRIBUTED} uses {use.name}, and must not know ranks"


def check_torch_fsdp_is_known_in_one_place(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """Only the compatibility modules, and the engines of certificates, import torch's own FSDP."""
    allowed = " and ".join(
        f"packages/{owner}/src/{owner.replace('-', '_')}/{places[0]}" for owner, places in COMPATIBILITY.items()
    )
    for package in packages.values():
        home = package.path / "src" / package.module
        for source in package.sources:
            if source.path.relative_to(home).parts[0] in COMPATIBILITY.get(package.name, ()):
                continue
            for use in source.uses:
                if use.level == 0 and any(_is_or_is_under(use.name, fsdp) for fsdp in TORCH_FSDP):
                    yield (f"{source.shown}:{use.line}: uses {use.name}; only {allowed} may")


def check_facades_are_not_used(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """Nothing of ours imports the façades of FSDP1's private modules, which are there for other programs."""
    for package in packages.values():
        facades = package.path / "src" / package.module / FACADES.rpartition(".")[2]
        for source in package.sources:
            for use in source.uses:
                if _is_or_is_under(use.name, FACADES) and not source.path.is_relative_to(facades):
                    yield f"{source.shown}:{use.line}: uses {use.name}, a façade that is there for other programs"


def check_dependencies(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """A package declares exactly the distributions that it imports; neighbours as ranges.

    Only the wrapper may declare add-ons, which it imports by name; nobody has to declare one that only types name.
    What a tool imports of ours may be an extra. The extra `test` has the tools that the package is tested with.
    """
    for package in packages.values():
        declared = [_distribution(text) for text in package.project.get("dependencies", [])]
        extras = package.project.get("optional-dependencies", {})
        optional = {_distribution(text) for texts in extras.values() for text in texts}
        imported: dict[str, str] = {}
        for source in package.sources:
            for use in source.uses:
                top = use.name.partition(".")[0]
                if use.module and not use.level and top != package.module and top not in sys.stdlib_module_names:
                    distribution = DISTRIBUTION_OF.get(top, top.replace("_", "-").lower())
                    if use.typing and distribution in PROMISED.get(package.name, ()):
                        continue
                    imported.setdefault(distribution, f"{source.shown}:{use.line}")
        shown = f"packages/{package.name}/pyproject.toml"
        for name in sorted(imported.keys() - set(declared) - optional):
            yield f"{imported[name]}: imports {name}, which {shown} does not declare"
        for name in sorted(set(declared) - imported.keys()):
            if not (name in ADDONS and package.name == "flatparam"):
                yield f"{shown}: declares {name}, which nothing in src imports"
        tools = TOOLS.keys() & tested_with(package.name) if package.name in PACKAGES else set()
        for name in sorted(tools - {package.name, *map(_distribution, extras.get("test", []))}):
            yield f"{shown}: the extra `test` lacks {name}, with which {package.name} is tested"
        for text in package.project.get("dependencies", []):
            if _distribution(text) in PACKAGES and not (">=" in text and "<" in text):
                yield f"{shown}: {text!r} must be a range with both ends (>=...,<...)"


def _distribution(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group(0)).lower() if found else requirement


def check_what_is_passed_on(packages: dict[str, Package], root: Path) -> Iterator[str]:
    """To each name that a layer's `__init__` passes on of those beneath, the layer's own signatures lead."""
    known = _Annotations.of(packages)
    layers = {package.module for package in packages.values() if package.name in LAYERS}
    for package in packages.values():
        # The wrapper is not built upon; its facade has names of all layers.
        if package.name not in PASSING_ON:
            continue
        init, public = package.path / "src" / package.module / "__init__.py", package.public_names() or set()
        uses = (use for source in package.sources if source.path == init for use in source.uses if not use.typing)
        passed = {
            use.name.rpartition(".")[2] for use in uses if use.module.partition(".")[0] in layers - {package.module}
        }
        reached = known.reached_from(package)
        for name in sorted(passed & public):
            if name not in reached and name not in known.names_of_things and name not in ALSO_PASSED_ON:
                yield f"packages/{package.name}: passes {name} on, to which none of its signatures leads"


@dataclass(frozen=True)
class _Annotations:
    """Which names the annotations of each class and function mention, and which classes each package defines."""

    mentioned: dict[str, set[str]]
    classes: set[str]
    of_package: dict[str, set[str]]
    names_of_things: set[str]

    @classmethod
    def of(cls, packages: dict[str, Package]) -> "_Annotations":
        mentioned: dict[str, set[str]] = {}
        classes: set[str] = set()
        of_package: dict[str, set[str]] = {}
        names: set[str] = set()
        for package in packages.values():
            own = of_package.setdefault(package.name, set())
            for source in package.sources:
                for node in source.tree.body:
                    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                        found = _mentioned(node)
                        mentioned.setdefault(node.name, set()).update(found)
                        own |= found
                        if isinstance(node, ast.ClassDef):
                            classes.add(node.name)
                    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                        # An alias or a constant of a type.
                        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                        if isinstance(target, ast.Name) and target.id != "__all__":
                            mentioned.setdefault(target.id, set()).update(_mentioned(node))
                            own |= _mentioned(node)
                if source.path.name == "names.py":
                    names |= _dunder_all(source.tree) or _defined(source.tree)
        return cls(mentioned, classes, of_package, names)

    def reached_from(self, package: Package) -> set[str]:
        """The classes that the package's signatures mention, those that theirs mention, and functions over any."""
        reached: set[str] = set()
        waiting = list(self.of_package[package.name])
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(self.mentioned.get(name, ()))
        types = reached & self.classes
        return reached | {name for name, found in self.mentioned.items() if found & types}


def _mentioned(node: ast.AST) -> set[str]:
    """The names in the annotations within a definition, and of the base classes; strings are read as annotations."""
    annotations: list[ast.AST] = []
    for part in ast.walk(node):
        if isinstance(part, (ast.AnnAssign, ast.arg)):
            annotations += [part.annotation] if part.annotation else []
        elif isinstance(part, ast.FunctionDef):
            annotations += [part.returns] if part.returns else []
        elif isinstance(part, ast.ClassDef):
            annotations += part.bases
    found: set[str] = set()
    for annotation in annotations:
        for part in ast.walk(annotation):
            if isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found |= set(re.findall(r"[A-Za-z_]\w*", part.value))
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        found |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    return found


RULES: Final[tuple[Callable[[dict[str, Package], Path], Iterator[str]], ...]] = (
    check_shape,
    check_names,
    check_core_is_free_of_distributed,
    check_torch_fsdp_is_known_in_one_place,
    check_facades_are_not_used,
    check_dependencies,
    check_what_is_passed_on,
)


def read_packages(root: Path) -> dict[str, Package]:
    """Return the packages of a checkout by the name of their distribution."""
    folders = sorted(path for path in (root / "packages").iterdir() if path.is_dir())
    return {path.name: Package(path, root) for path in folders if (path / "pyproject.toml").exists()}


def problems(root: Path) -> list[str]:
    """Return everything that breaks a rule, each once."""
    packages = read_packages(root)
    return list(dict.fromkeys(found for rule in RULES for found in rule(packages, root)))


def main(arguments: list[str]) -> int:
    """Print what is wrong, and return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = problems(root.resolve())
    for problem in found:
        print(problem)
    if not found:
        print(f"{len(RULES)} rules about {len(LAYERS)} layers, their add-ons and their tools hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
