"""docs/compatibility.md: what is between its markers, from docs/compatibility.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pages import fill, table

from .names import INSTEAD
from .rows import PYTHONS, TORCHES, Row, next_minor

__all__ = ["python_classifiers", "python_range", "torch_range", "write"]

LEFT: Final = ("---",)


def write(results: Mapping[str, Any], page: Path) -> None:
    """Fill the page's sections."""
    sections = {"tested": _tested, "lacks": _lacks, "private": _private}
    fill(page, {name: "\n\n".join(render(results)) for name, render in sections.items()})


def torch_range() -> str:
    """Return the range of torch that the tested versions stand for."""
    lowest = ".".join(TORCHES[0].split(".")[:2])
    return f"torch>={lowest},<{next_minor(TORCHES[-1])}"


def python_range() -> str:
    """Return the oldest Python that is tested, as packages say it."""
    return f">={PYTHONS[0]}"


def python_classifiers() -> list[str]:
    """Return the Pythons that are tested, as packages say it."""
    return [f"Programming Language :: Python :: {python}" for python in PYTHONS]


def _tested(results: Mapping[str, Any]) -> Iterator[str]:
    rows: Mapping[str, Any] = results["rows"]
    head = ["", *(f"Python {python}" for python in PYTHONS)]
    yield table([head, *([f"torch {torch}", *(_cell(rows, torch, p) for p in PYTHONS)] for torch in TORCHES)], LEFT)
    yield "What that was:"
    lines = [["environment", "layers", "integration", "minutes", "day", "machine"]]
    for entry in rows.values():
        suites = [_counts(entry[suite]) for suite in ("layers", "integration")]
        installed = f"torch {entry['installed']}, Python {entry['python']}"
        lines.append([installed, *suites, f"{entry['seconds'] / 60:.0f}", entry["date"], entry["machine"]])
    yield table(lines, LEFT)


def _cell(rows: Mapping[str, Any], torch: str, python: str) -> str:
    entry = rows.get(Row(torch, python).name)
    if entry is None:
        return ""
    counts = [entry["layers"], entry["integration"]]
    failed = sum(each["failed"] for each in counts)
    return f"**{failed} failed**" if failed else f"{sum(each['passed'] for each in counts):,} passed"


def _counts(suite: Mapping[str, int]) -> str:
    said = [f"{suite[kind]:,} {kind}" for kind in ("passed", "failed", "skipped") if suite[kind]]
    return ", ".join(said) or "none"


def _lacks(results: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Mapping[str, Any]] = list(results["rows"].values())
    lacked = sorted({name for entry in rows for name in entry["lacks"]})
    if not rows:
        yield "No row has been entered yet."
        return
    if not lacked:
        yield "None of them lacks any."
        return
    lines = [["name", "lacked by torch", "what is done there"]]
    for name in lacked:
        by = sorted({entry["torch"] for entry in rows if name in entry["lacks"]}, key=TORCHES.index)
        lines.append([f"`{name}`", ", ".join(by), INSTEAD.get(name, "**nothing**")])
    yield table(lines, LEFT)


def _private(results: Mapping[str, Any]) -> Iterator[str]:
    yield f"Of the {results['names']['used']} names of torch in the packages' sources, these:"
    yield "\n".join(f"* `{name}`" for name in results["names"]["private"])
