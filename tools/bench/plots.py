"""The pictures of docs/performance.md, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there are results of into `folder`; returns a sentence for each picture."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return ["no pictures: matplotlib is not installed (pip install matplotlib)"]
    told = []
    if results.get("steps"):
        figure = Figure(figsize=(10, 1 + 2.8 * len(results["steps"])), layout="constrained")
        _draw_steps(results["steps"], figure)
        told.append(_save(figure, folder / "performance-steps.svg"))
    growth = {title: entry for title, entry in results.get("growth", {}).items() if len(entry["rows"]) > 1}
    if growth:
        figure = Figure(figsize=(10, 4 * len(growth)), layout="constrained")
        _draw_growth(growth, figure)
        told.append(_save(figure, folder / "performance-growth.svg"))
    return told


def _draw_steps(tables: Mapping[str, Any], figure: Any) -> None:
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for axes, (title, entry) in zip(grid, tables.items(), strict=True):
        names = list(entry["rows"])
        for panel, key, label in zip(axes, ("x_sharded_floor", "x_cpu"), ("step", "CPU time"), strict=True):
            low, middle, high = zip(*(entry["rows"][name][key] for name in names), strict=True)
            errors = [
                [m - a for a, m in zip(low, middle, strict=True)],
                [b - m for b, m in zip(high, middle, strict=True)],
            ]
            colours = ["tab:blue" if name.startswith("flatparam") else "tab:gray" for name in names]
            panel.barh(names, middle, xerr=errors, color=colours)
            panel.invert_yaxis()
            panel.set_title(f"{title}: {label} x sharded floor", fontsize=8)
            panel.tick_params(labelsize=6)
        axes[1].set_yticklabels([])


def _draw_growth(tables: Mapping[str, Any], figure: Any) -> None:
    grid = figure.subplots(len(tables), 2, squeeze=False)
    for axes, (title, entry) in zip(grid, tables.items(), strict=True):
        rows = entry["rows"]
        sizes = [int(shape.split("x")[title.startswith("parameters")]) for shape in rows]
        for panel, part in zip(axes, ("build", "pass"), strict=True):
            for name in next(iter(rows.values())):
                panel.plot(sizes, [by[name][part] for by in rows.values()], "o-", label=name)
            panel.set(xscale="log", yscale="log", xlabel=title, ylabel=f"{part}, seconds of CPU")
            panel.grid(alpha=0.3)
        axes[0].legend(fontsize=6)


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path, metadata={"Date": None})
    return f"drew {path}"
