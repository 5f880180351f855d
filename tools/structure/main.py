"""The table, and the budgets that fail the build."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from pages import table

from structure.budgets import BUDGETS, FIGURES, beyond, lines_of, over_budget
from structure.density import figures_of
from structure.page import PAGE, page_of, text_of
from structure.sources import House
from structure.walk import LIBRARIES, MOMENTS, Trace, returns, trace

ROOT: Final = Path(__file__).resolve().parents[2]
GOALS: Final = {
    "files of a step": 20,
    "lines of a step": 3000,
    "functions of a step": 150,
    "file changes of a step": 450,
    "classes of a step": 18,
    "files of making a sharded model": 25,
    "files of state_dict": 15,
    "files of Checkpointer.save": 30,
    "import circles": 0,
    "modules in the widest folder": 12,
    "imports of a module, 90th percentile": 12,
    "fields of Unit": 10,
    "fields of FlatParamHandle": 10,
    "attributes of a unit written from outside": 0,
    "runtime files with private names of torch": 1,
    'docstrings that begin with "What"': 0,
    "returns when a gradient arrives": 4,
    "returns when a forward begins": 4,
    **{f"lines of {name}": budget.goal for name, budget in BUDGETS.items()},
}


def figures(root: Path) -> dict[str, tuple[int, Any]]:
    """Each figure, and what it is made of."""
    house = House.of(root)
    step, *others = (_apart(root, moment=moment) for moment in MOMENTS)
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in step.files}
    circles, (modules, folder) = house.circles(), house.widest_folder()
    written = house.written_from_outside("Unit", ("unit", "each", "lender", "borrower", "other"))
    private = house.files_with_private_names_of_torch("flatparam_runtime")
    fragments = house.docstrings_that_begin_with("What")
    hooks = ("_gradient_arrived", "before_forward")
    arrived, begun = (step.longest_way(name, "flatparam_runtime") for name in hooks)
    return {
        "files of a step": (len(step.files), [str(path.relative_to(root)) for path in step.files]),
        "lines of a step": (sum(lines.values()), {str(k.relative_to(root)): n for k, n in lines.items()}),
        "functions of a step": (len(step.functions), None),
        "file changes of a step": (step.file_changes, None),
        "classes of a step": (len(step.classes), sorted(step.classes)),
        **{
            f"files of {moment}": (len(each.files), [str(path.relative_to(root)) for path in each.files])
            for moment, each in zip(MOMENTS[1:], others, strict=True)
        },
        "import circles": (len(circles), circles),
        "modules in the widest folder": (modules, folder),
        "imports of a module, 90th percentile": (house.imports_at_percentile(90), None),
        "fields of Unit": (house.fields("Unit"), None),
        "fields of FlatParamHandle": (house.fields("FlatParamHandle"), None),
        "attributes of a unit written from outside": (len(written), written),
        "runtime files with private names of torch": (len(private), private),
        'docstrings that begin with "What"': (sum(fragments.values()), fragments),
        "returns when a gradient arrives": (returns(arrived), [path.stem for path in arrived]),
        "returns when a forward begins": (returns(begun), [path.stem for path in begun]),
        **{f"lines of {name}": (lines, None) for name, lines in lines_of(house).items()},
    }


def _apart(root: Path, library: str = "flatparam", moment: str = "step") -> Trace:
    """The trace of a moment, made in a process of its own: it forks, which a process can do safely once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(trace, root, library, moment).result()


def print_budgets(root: Path) -> int:
    """Print each figure that has a budget beside it and its goal; return 1 if one is beyond its budget."""
    house = House.of(root)
    lines = [["package", "lines", "budget", "goal"]]
    for name, count in lines_of(house).items():
        budget = BUDGETS.get(name)
        lines.append([name, f"{count:,}", *([f"{budget.most:,}", f"{budget.goal:,}"] if budget else ["none", ""])])
    print(table(lines))
    counted = figures_of(house, root)
    rows = [
        [name, f"{figure:,}", f"{FIGURES[name].most:,}", f"{FIGURES[name].goal:,}"] for name, figure in counted.items()
    ]
    print()
    print(table([["figure", "now", "budget", "goal"], *rows]))
    problems = [*over_budget(house), *beyond(counted)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def main(arguments: Sequence[str]) -> int:
    """Print the figures, each beside its goal; `--json` prints what they are made of, too.

    `--page` writes the page that follows a step through the files instead, and `--step` prints the step's code.
    `--budgets` prints what has a budget, and returns 1 if something is beyond it.
    """
    parser = argparse.ArgumentParser(
        prog="python tools/structure", description="How the packages are built, in figures."
    )
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE} anew")
    parser.add_argument("--print", action="store_true", help="with --page: print the page and write nothing")
    parser.add_argument("--step", action="store_true", help="print the code that one step runs, as one text")
    parser.add_argument("--budgets", action="store_true", help="print lines and budgets; 1 if one is exceeded")
    options = parser.parse_args(arguments)
    if options.budgets:
        return print_budgets(ROOT)
    if options.step:
        print(text_of(trace(ROOT)))
        return 0
    if options.page:
        page = ROOT / PAGE
        of_step = {library: _apart(ROOT, library) for library in LIBRARIES}
        others = {
            moment: {each: _apart(ROOT, each, moment) for each in LIBRARIES[: 1 if "Checkpointer" in moment else None]}
            for moment in MOMENTS[1:]
        }
        text = page_of(of_step, others, page.read_text(encoding="utf-8"))
        if options.print:
            print(text)
        else:
            page.write_text(text, encoding="utf-8")
        return 0
    found = figures(ROOT)
    if options.json:
        print(json.dumps({name: {"value": value, "of": of} for name, (value, of) in found.items()}, indent=1))
        return 0
    lines = [[name, f"{value:,}", f"{GOALS[name]:,}"] for name, (value, _) in found.items()]
    print(table([["figure", "now", "goal"], *lines]))
    return 0
