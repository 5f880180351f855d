"""The reference has every public name once, on the page of its package, and nothing else."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import house
from each_row import each_row

PAGES = Path(__file__).resolve().parent / "reference"
PACKAGES = [name.replace("-", "_") for name in house.PACKAGES]
PUBLIC_MODULES = {
    "flatparam": [
        "flatparam.layout",
        "flatparam.optim",
        "flatparam.wrap",
        "flatparam.sharded_grad_scaler",
        "flatparam.checkpoint",
        "flatparam.checkpoint.state_dict",
        "flatparam.algorithms._comm_hooks.default_hooks",
    ],
    "flatparam_clients": ["flatparam_clients.older_functions"],
    "flatparam_core": ["flatparam_core.testing"],
    "flatparam_comm": ["flatparam_comm.testing"],
    "flatparam_simdev": ["flatparam_simdev.device", "flatparam_simdev.worlds"],
}
# To import this one is to give the process a device; its source is read instead.
NOT_IMPORTED = "flatparam_simdev.device"
DOCUMENTED = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
REEXPORTED = re.compile(r"^\* \[`(?P<name>[\w.]+)`\]\((?P<page>[\w-]+\.md)#(?P<target>[\w.]+)\)$", re.MULTILINE)


def page_of(package: str) -> str:
    """Return the text of the package's page."""
    return (PAGES / f"{package.replace('_', '-')}.md").read_text(encoding="utf-8")


def documented(package: str) -> list[str]:
    """Return the dotted names that the page documents itself."""
    return DOCUMENTED.findall(page_of(package))


def linked(package: str) -> list[str]:
    """Return the dotted names that the page re-exports."""
    return [match["name"] for match in REEXPORTED.finditer(page_of(package))]


def resolve(dotted: str) -> object:
    """Return the object that a dotted name of a page stands for."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def names_in_source(module: str) -> set[str]:
    """Return the `__all__` of a module, which is not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


@each_row("package", PACKAGES)
def test_page_has_every_public_name_and_no_other(package: str) -> None:
    """A page's names are those of `__all__`; a re-exported name is a link to where it is documented."""
    public = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    below = tuple(f"{module}." for module in PUBLIC_MODULES.get(package, []))
    found = [name for name in documented(package) + linked(package) if not name.startswith(below)]
    assert sorted(found) == sorted(public)


@each_row("module", [module for modules in PUBLIC_MODULES.values() for module in modules])
def test_page_has_the_names_of_a_public_module(module: str) -> None:
    """What a public module adds to its package is on the page; what it repeats, or takes from torch, need not be."""
    package = module.partition(".")[0]
    found = [name for name in documented(package) + linked(package) if name.rpartition(".")[0] == module]
    if module == NOT_IMPORTED:
        assert sorted(found) == sorted(f"{module}.{name}" for name in names_in_source(module))
        return
    repeated = set(importlib.import_module(package).__all__)
    names = [name for name in importlib.import_module(module).__all__ if name not in repeated]
    # A constant is of no module.
    homes = {name: getattr(resolve(f"{module}.{name}"), "__module__", "") for name in names}
    torchs = {name for name, home in homes.items() if home.startswith("torch.")}
    public = {f"{module}.{name}" for name in names if name not in torchs}
    assert sorted(found) == sorted(public)


@each_row("package", PACKAGES)
def test_reexports_point_to_the_same_object(package: str) -> None:
    """A re-exported name links to the page that documents that very object."""
    for match in REEXPORTED.finditer(page_of(package)):
        home = match["page"].removesuffix(".md").replace("-", "_")
        assert match["target"] in documented(home), match["name"]
        assert resolve(match["name"]) is resolve(match["target"])
