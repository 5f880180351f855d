"""Test flatparam with each torch and on each Python that it supports, each in an environment of its own.

    nox -s matrix                     each torch on one Python, and each Python with one torch
    nox -s matrix -- 2.15.0           one torch, on the one Python
    nox -s matrix -- 2.14.1 3.12      this torch on this Python
    nox -s matrix -- --keep 2.15.0    keep the environment, in build/matrix, for the next time
    nox -s matrix -- 2.15.0 -k mesh   some tests: what is not a version goes to pytest, and nothing is entered
    nox -s matrix -- --again          what failed in the rows that were entered, and nothing else (`-- --again 2.15.0`)
    nox -s matrix -- --list           the rows
    nox -s matrix -- --page           docs/compatibility.md from the results

In each environment are an ordinary `pip install torch==VERSION`, the tools of the tests as tools/constraints.txt has
them, and the five packages as wheels. Tested are all tests of the layers and the short ones of integration, without
those marked `slow` or `gpu`. Tests that fail run once more, one after the other: a failure is one that fails twice, and
what passes alone is named in the results as "repeated". Results are entered in docs/compatibility.json, and the page is
written from it. An environment takes five gigabytes of disk and some minutes to download; there is one at a time.
"""

from __future__ import annotations

import json
import os
import platform
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .environments import HOME, LADDER, ROOT, Environment, RowError, environment
from .names import INSTEAD, names_used, private_names, unplaced
from .page import write
from .rows import Row, all_rows, choose

__all__ = ["RESULTS", "SUITES", "counts", "main", "node_id", "repeated", "verdict"]

RESULTS: Final = ROOT / "docs" / "compatibility.json"
SUITES: Final = {
    "layers": tuple(f"packages/{name}/tests" for name in LADDER),
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


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status: 1 where a row is not green."""
    known = ("--again", "--keep", "--list", "--page", "--help", "-h")
    options = {option for option in known if option in arguments}
    rows, for_pytest = choose([argument for argument in arguments if argument not in options])
    if options & {"--help", "-h"}:
        print(__doc__)
    elif "--list" in options:
        print("\n".join(map(str, all_rows())))
    elif "--page" in options:
        write(_results(), RESULTS.with_suffix(".md"))
    else:
        again = "--again" in options
        if again:
            rows = [row for row in rows if _failed_before(row)]
        outcomes = {row: _outcome(row, for_pytest, keep="--keep" in options, again=again) for row in rows}
        for row, outcome in outcomes.items():
            print(f"{row!s:<28} {outcome}")
        return 0 if all(outcome.startswith("ok") for outcome in outcomes.values()) else 1
    return 0


def _failed_before(row: Row) -> bool:
    """Whether the row was entered with a failure."""
    entry = _results()["rows"].get(row.name)
    return entry is not None and any(entry[suite]["failed"] for suite in SUITES)


def _outcome(row: Row, for_pytest: Sequence[str], *, keep: bool, again: bool) -> str:
    """Test the row, and say how it went in a line that begins with `ok` where it went well."""
    print(f"\n{row}", flush=True)
    started = time.monotonic()
    try:
        if unplaced():
            raise RowError(
                f"say in tools/matrix/names.py whose attributes these are: {', '.join(unplaced())}"
            )
        with environment(row, keep=keep) as made:
            if for_pytest:
                folders = [folder for suite in SUITES.values() for folder in suite]
                code = made.show(*_pytest(row, "chosen", folders), *SPREAD, *for_pytest)
                return "ok, not entered" if code == 0 else f"FAILED: pytest ended with {code}"
            entry = _tested_again(row, made) if again else _tested(row, made)
    except RowError as error:
        return f"FAILED: {error}"
    entry["seconds"] = round(time.monotonic() - started) + (entry["seconds"] if again else 0)
    _enter(row, entry)
    return verdict(entry)


def _tested(row: Row, made: Environment) -> dict[str, Any]:
    facts = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, installed = made.run("-W", "ignore", "-c", facts).stdout.split()
    lacks = json.loads(made.run("-W", "ignore", "tools/matrix/names.py").stdout)
    entry: dict[str, Any] = {"torch": row.torch, "installed": installed, "python": python, "lacks": lacks}
    for suite, folders in SUITES.items():
        entry[suite] = _suite(row, made, suite, folders)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return {**entry, "date": time.strftime("%Y-%m-%d"), "machine": machine}


def _tested_again(row: Row, made: Environment) -> dict[str, Any]:
    entry: dict[str, Any] = {**_results()["rows"][row.name]}
    for suite in SUITES:
        if entry[suite]["failed"]:
            tests = [node_id(name) for name in entry[suite]["failures"]]
            entry[suite] = repeated(entry[suite], _reported(row, made, suite, tests))
    return entry


def node_id(name: str) -> str:
    """What pytest calls the test that its report calls `a.b.test_c::test_d[e]`: `a/b/test_c.py::test_d[e]`."""
    module, _, function = name.partition("::")
    return f"{module.replace('.', '/')}.py::{function}"


def _suite(row: Row, made: Environment, suite: str, folders: Sequence[str]) -> dict[str, Any]:
    """Run the tests of a suite, and those that fail once more, alone."""
    first = _reported(row, made, suite, folders, *SPREAD)
    if not first["failed"]:
        return first
    again = _reported(row, made, suite, folders, "--last-failed", "--last-failed-no-failures", "none")
    return repeated(first, again)


def _reported(row: Row, made: Environment, suite: str, folders: Sequence[str], *how: str) -> dict[str, Any]:
    report = HOME / f"{row.name}-{suite}.xml"
    report.unlink(missing_ok=True)
    code = made.show(*_pytest(row, suite, folders), *how, f"--junit-xml={report}")
    if code not in (0, 1) or not report.exists():
        raise RowError(f"pytest ended with {code} in the tests of {suite}")
    return counts(report)


def _pytest(row: Row, suite: str, folders: Sequence[str]) -> list[str]:
    cache = HOME / f"{row.name}-{suite}.cache"  # which tests failed last
    return [*PYTEST, "-o", f"cache_dir={cache}", "-m", "not gpu and not slow", *folders]


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
    """Say how a row went, in a line that begins with `ok` where it went well."""
    missing = [name for name in entry["lacks"] if name not in INSTEAD]
    failed = sum(entry[suite]["failed"] for suite in SUITES)
    said = ", ".join(f"{suite} {entry[suite]['passed']} passed" for suite in SUITES)
    if failed or missing:
        return f"FAILED: {failed} tests failed, {said}; names it lacks: {', '.join(missing) or 'none'}"
    return f"ok, {said}, {entry['seconds'] / 60:.0f} minutes"


def _results() -> dict[str, Any]:
    found: dict[str, Any] = (
        json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    )
    return found


def _enter(row: Row, entry: dict[str, Any]) -> None:
    """Put the row into the results in place of an earlier one, and write the page anew."""
    results = _results()
    rows = {**results["rows"], row.name: entry}
    order = [each.name for each in all_rows()]
    others = sorted(rows.keys() - set(order))
    results["rows"] = {name: rows[name] for name in [*order, *others] if name in rows}
    results["names"] = {"used": len(names_used()), "private": private_names()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write(results, RESULTS.with_suffix(".md"))
