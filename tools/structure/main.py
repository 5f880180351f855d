"""The table, and the budgets that fail the build."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from pages import table

from structure.budgets import BUDGETS, FIGURES, WALKED, Budget, beyond, lines_of, over_budget
from structure.density import figures_of
from structure.page import PAGE, page_of, text_of
from structure.sources import House
from structure.walk import LIBRARIES, MOMENTS, Trace, returns, trace

ROOT: Final = Path(__file__).resolve().parents[2]


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
    }


def _apart(root: Path, library: str = "flatparam", moment: str = "step") -> Trace:
    """The trace of a moment, made in a process of its own: it forks, which a process can do safely once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(trace, root, library, moment).result()


def print_budgets(root: Path, *, walks: bool) -> int:
    """Print each figure beside its budget and its goal; return 1 if one is beyond its budget.

    Args:
        walks: follow a step, and other moments, too.
    """
    house = House.of(root)
    lines, counted = lines_of(house), figures_of(house, root)
    print(table([["package", "lines", "budget", "goal"], *_rows(lines, BUDGETS)]))
    print()
    print(table([["figure", "now", "budget", "goal"], *_rows(counted, FIGURES)]))
    problems = [*over_budget(house), *beyond(counted)]
    if walks:
        walked = {name: figure for name, (figure, _) in figures(root).items()}
        print()
        print(table([["figure", "now", "budget", "goal"], *_rows(walked, WALKED)]))
        problems += beyond(walked, WALKED)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _rows(counted: Mapping[str, int], budgets: Mapping[str, Budget]) -> list[list[str]]:
    none = ["none", ""]
    both = {name: [f"{budget.most:,}", f"{budget.goal:,}"] for name, budget in budgets.items()}
    return [[name, f"{figure:,}", *both.get(name, none)] for name, figure in counted.items()]


def main(arguments: Sequence[str]) -> int:
    """Print the figures, each beside its budget and its goal; return 1 if something is beyond its budget.

    `--budgets` prints those that the sources tell at once. `--json` prints what the others are made of. `--page` writes
    the page that follows a step through the files instead, and `--step` prints the step's code.
    """
    parser = argparse.ArgumentParser(
        prog="python tools/structure", description="How the packages are built, in figures."
    )
    parser.add_argument("--json", action="store_true", help="print what figures are made of, as JSON")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE} anew")
    parser.add_argument("--print", action="store_true", help="with --page: print the page and write nothing")
    parser.add_argument("--step", action="store_true", help="print the code that one step runs, as one text")
    parser.add_argument("--budgets", action="store_true", help="print what needs no walk through a step")
    options = parser.parse_args(arguments)
    if options.budgets:
        return print_budgets(ROOT, walks=False)
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
    if options.json:
        found = figures(ROOT)
        print(json.dumps({name: {"value": value, "of": of} for name, (value, of) in found.items()}, indent=1))
        return 0
    return print_budgets(ROOT, walks=True)
