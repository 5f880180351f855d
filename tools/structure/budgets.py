"""The lines of source that a package may have: the build fails beyond them, and the goal is less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from structure.sources import House

__all__ = ["BUDGETS", "Budget", "lines_of", "over_budget"]


@frozen
class Budget:
    """The lines of a package, comments, docstrings and blank lines too."""

    most: int
    """The package as it is, rounded up: lower this with every change that lets you, and never raise it."""
    goal: int
    """For the layers, what the plan of the house asks for; for an add-on or a tool, the most that any may have."""


#: A new add-on needs a row, and so does a tool.
BUDGETS: Final[Mapping[str, Budget]] = {
    "flatparam-core": Budget(5_300, 4_500),
    "flatparam-comm": Budget(6_150, 5_500),
    "flatparam-runtime": Budget(7_050, 5_500),
    "flatparam-state": Budget(5_600, 4_700),
    "flatparam": Budget(10_800, 6_000),
    "flatparam-files": Budget(9_050, 8_000),
    "flatparam-checkpoint": Budget(3_400, 8_000),
    "flatparam-guard": Budget(3_150, 8_000),
    "flatparam-onehost": Budget(1_300, 8_000),
    "flatparam-optim": Budget(3_200, 8_000),
    "flatparam-plan": Budget(7_450, 8_000),
    "flatparam-publish": Budget(2_550, 8_000),
    "flatparam-simdev": Budget(2_100, 8_000),
}


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
            found.append(
                f"{name} has {lines:,} lines and no budget: give it one in tools/structure/budgets.py"
            )
        elif lines > budgets[name].most:
            found.append(
                f"{name} has {lines:,} lines, and its budget is {budgets[name].most:,}: remove as many as you add, or "
                "make what is new an add-on (CONTRIBUTING.md)"
            )
    return found
