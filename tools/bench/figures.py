"""From samples of both ranks to medians and ratios, and to a table of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .contenders import FLOOR, SHARDED_FLOOR
from .rounds import COLUMNS

Row = dict[str, Any]

HEADINGS: Final[dict[str, str]] = {
    "x_floor": "x floor",
    "x_sharded_floor": "x sharded floor",
    "forward": "forward",
    "backward": "backward",
    "update": "update ms",
    "x_cpu": "CPU x",
    "user": "user",
    "system": "sys ms",
    "faults": "faults",
    "peak": "peak MB",
    "at_rest": "rest MB",
    "sent": "sent MB",
    "collectives": "coll.",
    "operators": "ATen",
    "python_calls": "calls",
}
_QUARTILES: Final = {"x_floor", "x_sharded_floor", "x_cpu"}
_MEGABYTES: Final = {"peak", "at_rest", "sent"}
_MILLISECONDS: Final = {"forward", "backward", "update", "user", "system"}


def timings(of_ranks: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, Row]:
    """For each contender: ratios as [lower quartile, median, upper quartile] over the rounds, the rest as medians.

    A step takes as long as it does on the slower rank; CPU time and faults are of both ranks together.
    """
    names = list(of_ranks[0])
    steps = {name: _each_round(max, of_ranks, name, "step") for name in names}
    cpu = {
        name: [
            sum(pair)
            for pair in zip(*(_each_round(sum, of_ranks, name, part) for part in ("user", "system")), strict=True)
        ]
        for name in names
    }
    rows = {}
    for name in names:
        row: Row = {"rounds": len(steps[name]), "step": statistics.median(steps[name])}
        for part in ("forward", "backward", "update"):
            row[part] = statistics.median(_each_round(max, of_ranks, name, part))
        for part in ("user", "system", "faults"):
            row[part] = statistics.median(_each_round(sum, of_ranks, name, part))
        row["x_floor"] = quartiles_of_ratios(steps[name], steps[FLOOR])
        row["x_sharded_floor"] = quartiles_of_ratios(steps[name], steps[SHARDED_FLOOR])
        row["x_cpu"] = quartiles_of_ratios(cpu[name], cpu[SHARDED_FLOOR])
        rows[name] = row
    return rows


def exact(of_ranks: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """For each contender the counts of the rank that has more; the losses are those of rank 0."""
    return {
        name: {key: first[key] if key == "losses" else max(rank[name][key] for rank in of_ranks) for key in first}
        for name, first in of_ranks[0].items()
    }


def quartiles_of_ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Of the ratios round by round."""
    return statistics.quantiles([a / b for a, b in zip(these, those, strict=True)], n=4)


def cell(key: str, value: Any) -> str:
    """A figure as the tables show it."""
    if value is None:
        return ""
    if key in _QUARTILES:
        low, middle, high = value
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"
    if key in _MEGABYTES:
        return f"{value / 1e6:.3f}"
    if key in _MILLISECONDS:
        return f"{1e3 * value:.1f}"
    return f"{value:.0f}"


def cells(rows: Mapping[str, Row]) -> list[list[str]]:
    """A line of headings, and a line for each contender."""
    lines = [["", *HEADINGS.values()]]
    lines += [[name, *(cell(key, row.get(key)) for key in HEADINGS)] for name, row in rows.items()]
    return lines


def as_text(lines: Iterable[Sequence[str]]) -> str:
    """A table for a terminal."""
    lines = list(lines)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _each_round(join: Any, of_ranks: Sequence[Mapping[str, list[list[float]]]], name: str, column: str) -> list[float]:
    number = COLUMNS.index(column)
    return [join(sample[number] for sample in samples) for samples in zip(*(r[name] for r in of_ranks), strict=True)]
