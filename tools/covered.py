"""Lines and branches of packages that tests have run: `python tools/covered.py build/coverage/flatparam-core ...`.

Each argument is a file of measurements, named after its package. Prints a row per package, the files of which most is
left, and exits with 1 if a figure is below the bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["BOUND", "Covered", "main", "table"]

ROOT: Final = Path(__file__).resolve().parent.parent
#: Percent, of lines and of branches.
BOUND: Final = 95.0
#: How many files are named.
_NAMED: Final = 5


@dataclass(frozen=True)
class Covered:
    """What of a package, or of a file, was run."""

    name: str
    lines: int
    lines_run: int
    branches: int
    branches_run: int

    @staticmethod
    def of(name: str, summary: Mapping[str, Any]) -> Covered:
        """Return the figures of a summary in coverage's JSON."""
        return Covered(
            name,
            summary["num_statements"],
            summary["covered_lines"],
            summary["num_branches"],
            summary["covered_branches"],
        )

    @property
    def percent(self) -> tuple[float, float]:
        """The lines and the branches that were run, in percent; 100 if there is none."""
        return _percent(self.lines_run, self.lines), _percent(self.branches_run, self.branches)

    @property
    def left(self) -> int:
        """How many lines and branches were not run."""
        return self.lines - self.lines_run + self.branches - self.branches_run


def table(packages: Sequence[Covered]) -> str:
    """Return the packages' figures, a row each."""
    rows = [f"{'package':<20} {'lines':>16} {'branches':>16}"]
    for each in packages:
        lines, branches = each.percent
        rows.append(
            f"{each.name:<20} {lines:7.2f} % {f'of {each.lines:,}':>9}"
            f"{branches:7.2f} % {f'of {each.branches:,}':>9}"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Print the figures of each file of measurements; return 1 if one is below the bound."""
    packages: list[Covered] = []
    for argument in arguments:
        report = _report(Path(argument).resolve())
        packages.append(Covered.of(Path(argument).name, report["totals"]))
        files = [Covered.of(name, found["summary"]) for name, found in report["files"].items()]
        most = sorted(files, key=lambda each: each.left, reverse=True)[:_NAMED]
        named = ", ".join(f"{Path(each.name).name} {each.left}" for each in most if each.left)
        print(f"{packages[-1].name}: most lines and branches are left in {named or 'no file'}")
    print(table(packages))
    short = [each.name for each in packages if min(each.percent) < BOUND]
    if short:
        print(f"Below {BOUND:g} %: {', '.join(short)}")
    return 1 if short else 0


def _report(data: Path) -> dict[str, Any]:
    """Combine what the processes wrote beside `data`, and return coverage's JSON of it."""
    coverage = (sys.executable, "-m", "coverage")
    output = data.with_name(f"{data.name}.json")
    if list(data.parent.glob(f"{data.name}.*.*")):
        subprocess.run(
            [*coverage, "combine", "--quiet", "--append", f"--data-file={data}"], cwd=ROOT, check=True
        )
    subprocess.run(
        [*coverage, "json", "--quiet", f"--data-file={data}", "-o", str(output)], cwd=ROOT, check=True
    )
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
