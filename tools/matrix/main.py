"""Test flatparam in this environment, which has one torch on one Python, and enter what was found.

    python tools/matrix              run the tests, and say how it went
    python tools/matrix -k mesh      some of them: what is not an option of this command goes to pytest
    python tools/matrix --enter      enter the result in docs/compatibility.json, and write the page from it
    python tools/matrix --again      what failed in the row that was entered, and nothing else (with --enter: enters it)
    python tools/matrix --list       the rows
    python tools/matrix --page       docs/compatibility.md from the results, and the names of torch in the sources

`nox -s versions -- torch-2.15`, `-- python-3.12` and `-- lowest` make an environment and call this in it, and
`nox -s versions` does so for all rows, with --enter. Tested are all tests of the packages and the short ones of
integration, without those marked `slow` or `gpu`. Tests that fail run once more, one after the other: a failure is one
that fails twice, and what passes alone is named in the results as "repeated".
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from house import PACKAGES

from .names import INSTEAD, lacks, names_used, private_names, unplaced
from .page import write
from .rows import Row, all_rows

__all__ = ["RESULTS", "SUITES", "RowError", "counts", "main", "node_id", "repeated", "this_row", "verdict"]

ROOT: Final = Path(__file__).resolve().parents[2]
HOME: Final = ROOT / "build" / "matrix"
RESULTS: Final = ROOT / "docs" / "compatibility.json"
SUITES: Final = {
    "layers": tuple(f"packages/{name}/tests" for name in PACKAGES),
    "integration": (
        "integration_tests/parity",
        "integration_tests/state/test_parity_model.py",
        "integration_tests/state/test_parity_optimizer.py",
        "integration_tests/state/test_tensor_parallel.py",
        "integration_tests/state/test_torch_files.py",
    ),
}
# A test has as long as it needs on a machine that does something else too. pytest's own tracebacks fail on some
# Pythons ("AST constructor recursion depth mismatch", 3.11.7), and take the whole run with them.
PYTEST: Final = ("-m", "pytest", "-q", "--tb", "native", "--timeout", "900", "-o", "faulthandler_timeout=0")
SPREAD: Final = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal")


class RowError(Exception):
    """A row cannot be tested here: a sentence for the user."""


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status: 1 if the row is not green."""
    known = ("--again", "--enter", "--list", "--page", "--help", "-h")
    options = {option for option in known if option in arguments}
    for_pytest = [argument for argument in arguments if argument not in options]
    if options & {"--help", "-h"}:
        print(__doc__)
        return 0
    if "--list" in options:
        print("\n".join(map(str, all_rows())))
        return 0
    if "--page" in options:
        _write(_results())
        return 0
    row = this_row()
    try:
        outcome = _outcome(row, for_pytest, enter="--enter" in options, again="--again" in options)
    except RowError as error:
        outcome = f"FAILED: {error}"
    print(f"{row!s:<28} {outcome}")
    return 0 if outcome.startswith("ok") else 1


def this_row() -> Row:
    """Return the torch and the Python of this process."""
    import torch

    return Row(torch.__version__.partition("+")[0], ".".join(map(str, sys.version_info[:2])))


def _outcome(row: Row, for_pytest: Sequence[str], *, enter: bool, again: bool) -> str:
    """Test the row, and say how it went in a line that begins with `ok` if it went well."""
    if unplaced():
        raise RowError(f"say in tools/matrix/names.py whose attributes these are: {', '.join(unplaced())}")
    HOME.mkdir(parents=True, exist_ok=True)
    if for_pytest:
        if enter or again:
            raise RowError(f"a part of the tests is not entered: leave out {' '.join(for_pytest)}, or --enter")
        folders = [folder for suite in SUITES.values() for folder in suite]
        code = _run([*_pytest(row, "chosen", folders), *SPREAD, *for_pytest])
        return "ok, not entered" if code == 0 else f"FAILED: pytest ended with {code}"
    if enter and row not in all_rows():
        raise RowError(f"{row} is not in the table: its rows are {', '.join(map(str, all_rows()))}")
    if again and not _failed_before(row):
        return "ok, nothing had failed"
    started = time.monotonic()
    entry = _tested_again(row) if again else _tested(row)
    entry["seconds"] = round(time.monotonic() - started) + (entry["seconds"] if again else 0)
    if enter:
        _enter(row, entry)
    return verdict(entry)


def _failed_before(row: Row) -> bool:
    """Whether the row was entered with a failure."""
    entry = _results()["rows"].get(row.name)
    return entry is not None and any(entry[suite]["failed"] for suite in SUITES)


def _tested(row: Row) -> dict[str, Any]:
    import torch

    entry: dict[str, Any] = {
        "torch": row.torch,
        "installed": str(torch.__version__),
        "python": platform.python_version(),
        "lacks": lacks(),
    }
    for suite, folders in SUITES.items():
        entry[suite] = _suite(row, suite, folders)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return {**entry, "date": time.strftime("%Y-%m-%d"), "machine": machine}


def _tested_again(row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = {**_results()["rows"][row.name]}
    for suite in SUITES:
        if entry[suite]["failed"]:
            tests = [node_id(name) for name in entry[suite]["failures"]]
            entry[suite] = repeated(entry[suite], _reported(row, suite, tests))
    return entry


def node_id(name: str) -> str:
    """What pytest calls the test that its report calls `a.b.test_c::test_d[e]`: `a/b/test_c.py::test_d[e]`."""
    module, _, function = name.partition("::")
    return f"{module.replace('.', '/')}.py::{function}"


def _suite(row: Row, suite: str, folders: Sequence[str]) -> dict[str, Any]:
    """Run the tests of a suite, and those that fail once more, alone."""
    first = _reported(row, suite, folders, *SPREAD)
    if not first["failed"]:
        return first
    again = _reported(row, suite, folders, "--last-failed", "--last-failed-no-failures", "none")
    return repeated(first, again)


def _reported(row: Row, suite: str, folders: Sequence[str], *how: str) -> dict[str, Any]:
    report = HOME / f"{row.name}-{suite}.xml"
    report.unlink(missing_ok=True)
    code = _run([*_pytest(row, suite, folders), *how, f"--junit-xml={report}"])
    if code not in (0, 1) or not report.exists():
        raise RowError(f"pytest ended with {code} in the tests of {suite}")
    return counts(report)


def _run(arguments: Sequence[str]) -> int:
    """Run this Python in the root of the checkout, showing what it prints; return the exit code."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode


def _pytest(row: Row, suite: str, folders: Sequence[str]) -> list[str]:
    cache = HOME / f"{row.name}-{suite}.cache"  # which tests failed last
    return [*PYTEST, "-o", f"cache_dir={cache}", "-m", "not gpu and not slow and not long", *folders]


def repeated(first: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a run of which the failures, and nothing else, were run once more."""
    failures = [name for name in first["failures"] if name in again["failures"]]
    others = [name for name in first["failures"] if name not in failures]
    total = {kind: first[kind] + again[kind] for kind in ("passed", "skipped")}
    return {
        **total,
        "failed": len(failures),
        "failures": failures,
        "repeated": first.get("repeated", []) + others,
    }


def counts(report: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and which failed."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["passed" if case.find("skipped") is None else "skipped"] += 1
    return counts


def verdict(entry: Mapping[str, Any]) -> str:
    """Say how a row went, in a line that begins with `ok` if it went well."""
    missing = [name for name in entry["lacks"] if name not in INSTEAD]
    failed = sum(entry[suite]["failed"] for suite in SUITES)
    said = ", ".join(f"{suite} {entry[suite]['passed']} passed" for suite in SUITES)
    if failed or missing:
        return f"FAILED: {failed} tests failed, {said}; names it lacks: {', '.join(missing) or 'none'}"
    return f"ok, {said}, {entry['seconds'] / 60:.0f} minutes"


def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    return found


def _enter(row: Row, entry: dict[str, Any]) -> None:
    """Put the row into the results in place of an earlier one, and write the page anew."""
    results = _results()
    rows = {**results["rows"], row.name: entry}
    order = [each.name for each in all_rows()]
    others = sorted(rows.keys() - set(order))
    results["rows"] = {name: rows[name] for name in [*order, *others] if name in rows}
    _write(results)


def _write(results: dict[str, Any]) -> None:
    """Write the results, with the names of today's sources, and the page."""
    results["names"] = {"used": len(names_used()), "private": private_names()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write(results, RESULTS.with_suffix(".md"))
