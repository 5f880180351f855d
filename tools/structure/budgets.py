"""The lines of source that a package may have: the build fails beyond them, and the goal is less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from structure.sources import House

__all__ = ["BUDGETS", "FIGURES", "WALKED", "Budget", "beyond", "lines_of", "over_budget"]


@frozen
class Budget:
    """The lines of a package, comments, docstrings and blank lines too, or another figure."""

    most: int
    """The package, or the figure, as it is: lower this with every change that lets you, and never raise it."""
    goal: int
    """For the layers, what the plan of the house asks for; for an add-on or a tool, the most that any may have."""


#: A new add-on needs a row, and so does a tool.
BUDGETS: Final[Mapping[str, Budget]] = {
    "flatparam-core": Budget(5_420, 4_500),
    "flatparam-comm": Budget(5_485, 5_500),
    "flatparam-runtime": Budget(6_559, 5_500),
    "flatparam-state": Budget(4_867, 4_700),
    "flatparam": Budget(6_872, 6_000),
    "flatparam-clients": Budget(3_890, 8_000),
    "flatparam-files": Budget(7_994, 8_000),
    "flatparam-certify": Budget(2_962, 8_000),
    "flatparam-checkpoint": Budget(3_391, 8_000),
    "flatparam-guard": Budget(3_148, 8_000),
    "flatparam-meshes": Budget(1_150, 8_000),
    "flatparam-onehost": Budget(1_271, 8_000),
    "flatparam-optim": Budget(3_549, 8_000),
    "flatparam-plan": Budget(7_847, 8_000),
    "flatparam-publish": Budget(2_458, 8_000),
    "flatparam-sums": Budget(1_722, 8_000),
    "flatparam-simdev": Budget(1_959, 8_000),
}


#: What `structure.density` counts.
FIGURES: Final[Mapping[str, Budget]] = {
    "files": Budget(393, 350),
    "files under 100 lines": Budget(108, 110),
    "lines": Budget(70_544, 52_000),
    "lines of imports and `__all__`, per mille": Budget(78, 80),
    "file names that occur twice or more": Budget(12, 15),
    "lines of the median function": Budget(6, 6),
    "lines of the longest function": Budget(77, 80),
    "public names of the layers": Budget(283, 240),
    "public names that layers pass on": Budget(44, 20),
    'docstrings "See `X`"': Budget(0, 0),
    "function docstrings without a verb": Budget(444, 500),
    'messages with "is no"': Budget(0, 0),
    "messages under 20 characters": Budget(0, 0),
    "lines of docs over 120 columns": Budget(0, 0),
    "fields of BackwardPass": Budget(9, 9),
    "fields of UnitTree": Budget(11, 9),
    "facts reachable from Unit": Budget(64, 30),
    "collections of a backward pass by unit": Budget(2, 2),
    "calls that free full parameters": Budget(5, 5),
    "our base classes with one subclass": Budget(0, 0),
}


#: What `structure.walk` follows, and what `structure.main` asks the sources besides. Which functions a collective runs
#: depends on whether the other rank was there before, so a step has some more at times.
WALKED: Final[Mapping[str, Budget]] = {
    "files of a step": Budget(34, 20),
    "lines of a step": Budget(9_627, 3_000),
    "functions of a step": Budget(256, 150),
    "file changes of a step": Budget(684, 450),
    "classes of a step": Budget(34, 18),
    "files of making a sharded model": Budget(58, 25),
    "files of state_dict": Budget(33, 15),
    "files of Checkpointer.save": Budget(46, 30),
    "import circles": Budget(2, 0),
    "modules in the widest folder": Budget(15, 12),
    "imports of a module, 90th percentile": Budget(17, 12),
    "fields of Unit": Budget(10, 10),
    "fields of FlatParamHandle": Budget(9, 10),
    "attributes of a unit written from outside": Budget(0, 0),
    "runtime files with private names of torch": Budget(1, 1),
    'docstrings that begin with "What"': Budget(0, 0),
    "returns when a gradient arrives": Budget(3, 4),
    "returns when a forward begins": Budget(4, 4),
}


def beyond(figures: Mapping[str, int], budgets: Mapping[str, Budget] = FIGURES) -> list[str]:
    """Return a sentence for each figure that is more than its budget."""
    return [
        f"{name}: expected at most {budgets[name].most:,}, found {figure:,}: bring it back, or do the same with less"
        for name, figure in figures.items()
        if figure > budgets[name].most
    ]


def lines_of(house: House) -> dict[str, int]:
    """Return the lines of each package that has any."""
    found: dict[str, int] = {}
    for module in house.modules:
        name = module.name.partition(".")[0].replace("_", "-")
        found[name] = found.get(name, 0) + module.lines
    return found


def over_budget(house: House, budgets: Mapping[str, Budget] = BUDGETS) -> list[str]:
    """Return a sentence for each package that has more lines than its budget, or no budget."""
    found = []
    for name, lines in lines_of(house).items():
        if name not in budgets:
            found.append(f"{name} has {lines:,} lines and no budget: give it one in tools/structure/budgets.py")
        elif lines > budgets[name].most:
            found.append(
                f"{name} has {lines:,} lines, and its budget is {budgets[name].most:,}: remove as many as you add, or "
                "make what is new an add-on (CONTRIBUTING.md)"
            )
    return found
