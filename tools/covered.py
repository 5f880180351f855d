"""Lines and branches of packages that tests have run: `python tools/covered.py build/coverage/flatparam-core ...`.

Each argument is what the tests of one package have measured, in a file that is named after the package. Prints a row
per package: how much of it its own tests have run, and how much the tests of all the arguments have (those of the
layers above run it on several ranks, as threads). Names the files of which most is left, and exits with 1 if a figure
of all is below the bound.
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


def table(rows: Sequence[tuple[Covered, Covered]]) -> str:
    """Return the figures of packages, a row each: by their own tests, and by all."""
    heads = ("lines", "by own tests", "by all", "branches", "by own tests", "by all")
    printed = [f"{'package':<18}" + "".join(f"{head:>14}" for head in heads)]
    for own, every in rows:
        cells = [f"{every.lines:,}", *(f"{each.percent[0]:.2f} %" for each in (own, every))]
        cells += [f"{every.branches:,}", *(f"{each.percent[1]:.2f} %" for each in (own, every))]
        printed.append(f"{every.name:<18}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(printed)


def main(arguments: Sequence[str]) -> int:
    """Print the figures of the packages; return 1 if one is below the bound."""
    files = [Path(argument).resolve() for argument in arguments]
    for file in files:
        _gather(file)
    everything = files[0].with_name("all")
    _coverage("combine", "--quiet", "--keep", f"--data-file={everything}", *map(str, files))
    rows = []
    for file in files:
        own, report = _report(file, file.name), _report(everything, file.name)
        rows.append((Covered.of(file.name, own["totals"]), Covered.of(file.name, report["totals"])))
        found = [Covered.of(name, each["summary"]) for name, each in report["files"].items()]
        most = sorted(found, key=lambda each: each.left, reverse=True)[:_NAMED]
        named = ", ".join(f"{Path(each.name).name} {each.left}" for each in most if each.left)
        print(f"{file.name}: most lines and branches are left in {named or 'no file'}")
    print(table(rows))
    short = [every.name for _, every in rows if min(every.percent) < BOUND]
    if short:
        print(f"Below {BOUND:g} %: {', '.join(short)}")
    return 1 if short else 0


def _gather(data: Path) -> None:
    """Add to `data` what processes wrote beside it after pytest had ended; a process that was killed wrote nothing."""
    late = list(data.parent.glob(f"{data.name}.*.*"))
    written = [str(path) for path in late if path.stat().st_size]
    if written:
        _coverage("combine", "--quiet", "--append", f"--data-file={data}", *written)
    for path in late:
        path.unlink(missing_ok=True)


def _report(data: Path, package: str) -> dict[str, Any]:
    """Return coverage's JSON about the files of `package`."""
    output = data.with_name(f"{data.name}-of-{package}.json")
    inside = f"--include=*/{package.replace('-', '_')}/*"
    _coverage("json", "--quiet", inside, f"--data-file={data}", "-o", str(output))
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True)


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
