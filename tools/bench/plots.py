"""The pictures of docs/performance.md and of the first page, if matplotlib is installed.

Flatparam is coloured and its peers are grey. The background is transparent and the ink is a middle grey, so that a
picture reads on a light page and on a dark one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

INK: Final = "#7b7b7b"
OURS: Final = "#2f86d6"
OURS_AT_REST: Final = "#1b5c9b"
PEER: Final = "#a6a6a6"
PEER_AT_REST: Final = "#808080"
STYLE: Final[dict[Any, Any]] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.hashsalt": "flatparam",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Settings of matplotlib; the salt gives equal results equal pictures."""
AT_A_GLANCE: Final = {
    "flatparam, shared memory": "flatparam, one host",
    "flatparam": "flatparam, gloo",
    "torch FSDP1": "torch FSDP1",
    "torch FSDP2": "torch FSDP2",
    "DeepSpeed ZeRO-3": "DeepSpeed ZeRO-3",
    "fairscale FSDP": "fairscale FSDP",
}
"""The contenders of the first page, which all free full parameters after forward, and their names there."""
GLANCED: Final = {"small, fp32": "GPT of 25 M parameters, fp32", "wide, fp32": "8 x Linear(2048, 2048), fp32"}


def draw(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there are results of into `folder`; returns a sentence for each picture."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError:
        return ["no pictures: matplotlib is not installed (pip install matplotlib)"]
    with rc_context(STYLE):
        return [_draw(name, shown, folder) for name, shown in pictures(results).items()]


def pictures(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results that each picture shows, by the name of its file."""
    steps = results.get("steps", {})
    growth = {title: entry for title, entry in results.get("growth", {}).items() if len(entry["rows"]) > 1}
    glance = {title: steps[title] for title in GLANCED if title in steps}
    shown = {
        "performance-time.svg": glance,
        "performance-memory.svg": glance,
        "performance-steps.svg": steps,
        "performance-growth.svg": growth,
    }
    return {name: tables for name, tables in shown.items() if tables}


def digest(shown: Mapping[str, Any]) -> str:
    """A picture's description ends with this: a picture of different results has a different one."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def _draw(name: str, shown: Mapping[str, Any], folder: Path) -> str:
    from matplotlib.figure import Figure

    painter, width, heading, height = _PAINTERS[name]
    figure = Figure(figsize=(width, heading + height * len(shown)), layout="constrained")
    painter(shown, figure)
    description = f"Drawn by `python tools/bench page` from docs/performance.json: results {digest(shown)}"
    figure.savefig(folder / name, transparent=True, metadata={"Date": None, "Description": description})
    return f"drew {folder / name}"


def _draw_time(tables: Mapping[str, Any], figure: Any) -> None:
    """The step beside that of the model alone, medians with quartiles."""
    for panel, (title, entry) in zip(_column(figure, len(tables)), tables.items(), strict=True):
        rows = _rows_at_a_glance(entry)
        low, middle, high = zip(*(row["x_floor"] for row in rows.values()), strict=True)
        panel.barh(_labels(rows), middle, color=colours(rows, OURS, PEER))
        panel.errorbar(middle, range(len(rows)), xerr=_errors(low, middle, high), fmt="none", ecolor=INK)
        panel.axvline(1, color=INK, linewidth=0.8, linestyle="--")
        panel.set_title(GLANCED[title], fontsize=10)
        write_values(panel, [f"{value:.2f}" for value in middle], high)
    figure.supxlabel("step over the same step without communication", fontsize=9)


def _draw_memory(tables: Mapping[str, Any], figure: Any) -> None:
    """The bytes of a rank's tensors: the most during a step, and, darker, what is left after it."""
    for panel, (title, entry) in zip(_column(figure, len(tables)), tables.items(), strict=True):
        rows = _rows_at_a_glance(entry)
        peaks = [row["peak"] / 1e6 for row in rows.values()]
        at_rest = [row["at_rest"] / 1e6 for row in rows.values()]
        panel.barh(_labels(rows), peaks, color=colours(rows, OURS, PEER))
        panel.barh(_labels(rows), at_rest, color=colours(rows, OURS_AT_REST, PEER_AT_REST))
        panel.set_title(GLANCED[title], fontsize=10)
        write_values(panel, [f"{peak:.0f}" for peak in peaks], peaks)
    figure.supxlabel("MB of a rank at the peak; darker: between steps", fontsize=9)


def _draw_steps(tables: Mapping[str, Any], figure: Any) -> None:
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for axes, (title, entry) in zip(grid, tables.items(), strict=True):
        rows = entry["rows"]
        for panel, key, label in zip(axes, ("x_sharded_floor", "x_cpu"), ("step", "CPU time"), strict=True):
            low, middle, high = zip(*(row[key] for row in rows.values()), strict=True)
            panel.barh(list(rows), middle, color=colours(rows, OURS, PEER))
            panel.errorbar(middle, range(len(rows)), xerr=_errors(low, middle, high), fmt="none", ecolor=INK)
            panel.invert_yaxis()
            panel.set_title(f"{title}: {label} x sharded floor", fontsize=9)
            panel.tick_params(labelsize=7)
        axes[1].set_yticklabels([])


def _draw_growth(tables: Mapping[str, Any], figure: Any) -> None:
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for axes, (title, entry) in zip(grid, tables.items(), strict=True):
        rows = entry["rows"]
        sizes = [int(shape.split("x")[title.startswith("parameters")]) for shape in rows]
        names = list(next(iter(rows.values())))
        for panel, part in zip(axes, ("build", "pass"), strict=True):
            for name, colour, marker in zip(names, colours(names, OURS, PEER), _markers(names), strict=True):
                values = [by[name][part] for by in rows.values()]
                panel.plot(sizes, values, marker=marker, color=colour, label=name)
            panel.set(xscale="log", yscale="log", xlabel=title, ylabel=f"{part}, seconds of CPU")
            panel.grid(alpha=0.3)
        axes[0].legend(fontsize=7)


def _column(figure: Any, count: int) -> Sequence[Any]:
    column: Sequence[Any] = figure.subplots(count, 1, squeeze=False)[:, 0]
    return column


def _rows_at_a_glance(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry["rows"][name] for name in AT_A_GLANCE if name in entry["rows"]}


def _labels(rows: Mapping[str, Any]) -> list[str]:
    return [AT_A_GLANCE[name] for name in rows]


def colours(names: Sequence[str] | Mapping[str, Any], ours: str, peer: str) -> list[str]:
    """The colour of each contender's bar."""
    return [ours if name.startswith("flatparam") else peer for name in names]


def _markers(names: Sequence[str]) -> str:
    """A marker for each, since peers have one colour."""
    return "os^Dvx*P"[: len(names)]


def _errors(low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    below = [m - a for a, m in zip(low, middle, strict=True)]
    above = [b - m for b, m in zip(high, middle, strict=True)]
    return [below, above]


def write_values(panel: Any, texts: Sequence[str], ends: Sequence[float]) -> None:
    """Write each bar's value behind its end, and the first bar on top."""
    for at, (text, end) in enumerate(zip(texts, ends, strict=True)):
        panel.annotate(text, (end, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.margins(x=0.14)
    panel.set_xlim(left=0)
    panel.invert_yaxis()


_PAINTERS: Final[dict[str, tuple[Any, float, float, float]]] = {
    "performance-time.svg": (_draw_time, 4.1, 0.3, 1.95),
    "performance-memory.svg": (_draw_memory, 4.1, 0.3, 1.95),
    "performance-steps.svg": (_draw_steps, 10, 1, 2.8),
    "performance-growth.svg": (_draw_growth, 10, 0, 4),
}
"""What draws each picture, its width, and its height: a part for the whole and a part for each table, all in inches."""
