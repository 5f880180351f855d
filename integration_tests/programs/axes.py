"""What is particular about a case, to see that the search tries everything and how often."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from integration_tests.programs.recipes import PRECISIONS, Configuration, Program
from integration_tests.programs.strategies import has_long
from integration_tests.programs.trees import build

Axis = Callable[[Program, Configuration], bool]


@functools.lru_cache(maxsize=4)
def _shapes(program: Program) -> Mapping[str, int]:
    model = build(program.tree, program.ties)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _has_no_biases(program: Program, _: Configuration) -> bool:
    return not any(name.endswith("bias") for name in _shapes(program))


def _has_unit_of_one(program: Program, configuration: Configuration) -> bool:
    names = list(_shapes(program))
    for unit in configuration.in_order:
        inside = [name for name in names if not unit or name.startswith(f"{unit}.")]
        names = [name for name in names if name not in inside]
        if len(inside) == 1:
            return True
    return False


def _flips(program: Program, configuration: Configuration, originals: bool) -> bool:
    flipped = {name for step in program.steps for name in step.flipped}
    return any(configuration.lists_originals(_owner(name, configuration)) == originals for name in flipped)


def _owner(name: str, configuration: Configuration) -> str:
    return next((unit for unit in configuration.in_order if not unit or name.startswith(f"{unit}.")), "")


AXES: dict[str, Axis] = {
    "a threshold set": lambda _, configuration: bool(configuration.thresholds),
    "a threshold of 1 or less": lambda _, configuration: any(n <= 1 for _, n in configuration.thresholds),
    "shards above 2^18 elements": lambda program, _: has_long(program.tree),
    "both of these": lambda program, configuration: has_long(program.tree) and bool(configuration.thresholds),
    "no biases": _has_no_biases,
    "a unit of one parameter": _has_unit_of_one,
    "single parameters frozen or thawed late": lambda p, c: _flips(p, c, originals=True),
    "flat parameters frozen or thawed late": lambda p, c: _flips(p, c, originals=False),
    "checkpointing after wrapping": lambda _, configuration: bool(configuration.checkpointed),
    "optimizers in different orders": lambda _, c: c.turned and c.ranks > 1,
    **{
        f"precision: {name}": lambda _, configuration, name=name: configuration.precision == name
        for name in PRECISIONS
        if name
    },
}


def axes_of(case: Sequence[Any]) -> Collection[str]:
    """Which of `AXES` a case is on, with any of its configurations."""
    program, *others = case
    configurations = [each for each in others if isinstance(each, Configuration)]
    return [name for name, holds in AXES.items() if any(holds(program, each) for each in configurations)]
