"""Plan eleven transformers, run them, and write what both say to docs/plans.md: `python tools/plans`.

`python tools/plans times` measures the time of steps beside the prediction instead, and `python tools/plans choice` the
steps of what the planner chooses beside those with each block as a unit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    # In the place of this folder, whose modules are not to be found by their own names.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pages import ROOT, between, fill, table

PAGE: Final = ROOT / "docs" / "plans.md"
GUIDE: Final = ROOT / "docs" / "guides" / "will-it-fit.md"
PICTURE: Final = ROOT / "docs" / "pictures" / "plan.svg"
TIMES_HEAD: Final = ("model", "transport", "predicted", "median", "middle half", "error")
CHOICE_HEAD: Final = ("planned beside each block", "transport", "ratio of steps", "middle half", "faster in")
COLUMNS: Final = ("---", "---", "---:")


def main() -> int:
    """Write the page and its picture; returns how many numbers were wrong."""
    import torch

    from plans.configurations import CONFIGURATIONS, OF_TRANSFORMERS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, wrong = [], 0
    for name, configuration in (CONFIGURATIONS | OF_TRANSFORMERS).items():
        row, errors = compared(name, configuration)
        rows.append(row)
        wrong += errors
        sys.stdout.write(" | ".join(row) + "\n")
    PAGE.write_text(page(rows, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    return wrong


def compared(name: str, configuration: object) -> tuple[list[str], int]:
    """The row of a configuration, planned and run, and how many of its numbers were wrong."""
    from flatparam_plan.costs import measure
    from flatparam_plan.rehearsal import rehearse
    from flatparam_plan.training import Setup
    from plans.configurations import Configuration

    assert isinstance(configuration, Configuration), "the table has no others"
    setup = Setup(wrap=configuration.units, **configuration.settings)
    program = configuration.program()
    planned = rehearse(program, setup).costs
    real = measure(program, setup, setup.topology())
    errors = planned.errors(real)
    said = ", ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in configuration.settings.items())
    sent = planned.steps[-1].sent_nbytes, real.steps[-1].sent_nbytes
    resting = planned.resting.nbytes, real.resting.nbytes
    cells = [f"{name}: {configuration.what}", f"`{said}`"]
    for plan, run in (resting, (planned.peak, real.peak), sent):
        cells += [f"{plan:,}", f"{plan - run:,}"]
    return [*cells, f"{len(dict(real.facts()))}", f"{len(errors)}"], len(errors)


def page(rows: Sequence[Sequence[str]], text: str) -> str:
    """The page `text` with the table."""
    of_each = [cell for what in ("at rest", "peak", "sent in a step") for cell in (what, "error")]
    head = ["transformer", "setup", *of_each, "numbers", "wrong"]
    named = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    said = f"Bytes of one rank, on the CPU; {named}, Python {platform.python_version()}."
    return between(text, "table", f"{table([head, *rows], COLUMNS)}\n\n{said}")


def times() -> None:
    """Write the tables of predicted and measured times, and of the planner's choice."""
    from plans.times import rows

    predictions, choices = rows()
    tables = table([TIMES_HEAD, *predictions], COLUMNS), table([CHOICE_HEAD, *choices], COLUMNS)
    fill(PAGE, {"times": "\n\nMilliseconds of a step.\n\n".join(tables)})


def choice() -> None:
    """Print what the planner chooses beside each block as a unit."""
    from plans.times import rows

    sys.stdout.write(table([CHOICE_HEAD, *rows()[1]], COLUMNS) + "\n")


def picture() -> str:
    """The picture of the command that the guide begins with."""
    from flatparam.command import main as flatparam

    command = GUIDE.read_text(encoding="utf-8").partition("$ flatparam ")[2].partition("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.svg"
        flatparam([*command.replace("\\\n", " ").split(), "--svg", str(path)])
        return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python tools/plans", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["table", "times", "choice"], default="table")
    wanted = parser.parse_args().what
    if wanted == "times":
        times()
    elif wanted == "choice":
        choice()
    else:
        sys.exit(1 if main() else 0)
