"""Two pictures: the loss, and the memory of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .costs import Costs
from .forecast import Forecast
from .meter import MemoryTimeline

_MISSING = "no plots: matplotlib is not installed (pip install matplotlib)"


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> str:
    """Draw training and held-out loss over steps; returns a sentence that says what was done."""
    training = [(record["step"], record["bits_per_byte"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["held_out_bits_per_byte"]) for record in records if "held_out_loss" in record]
    axes = _axes("step", "bits per byte")
    if axes is None:
        return _MISSING
    if training:
        axes.plot(*_columns(training), color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        axes.plot(*_columns(_smooth(training)), color="tab:blue", label="training, mean of 20 steps")
    if held_out:
        axes.plot(*_columns(held_out), "o-", color="tab:orange", label="held-out text")
    axes.set_title("Loss")
    return _save(axes, path)


def draw_memory(timeline: MemoryTimeline | None, at_rest: int, costs: Costs, path: Path) -> str:
    """Draw one rank's tensor memory over one step beside what DDP would hold at rest."""
    axes = _axes("milliseconds into the step", "MB on this rank")
    if axes is None:
        return _MISSING
    if timeline is not None:
        megabytes = [nbytes / 1e6 for nbytes in timeline.nbytes]
        axes.fill_between(timeline.milliseconds, megabytes, step="post", alpha=0.3, color="tab:blue")
        axes.step(timeline.milliseconds, megabytes, where="post", color="tab:blue", label="all tensors, one step")
    axes.axhline(
        at_rest / 1e6,
        color="tab:green",
        label=f"parameters, gradients, optimizer: one of {costs.ranks} shares",
    )
    axes.axhline(costs.held_by_ddp / 1e6, color="tab:red", linestyle="--", label="the same under DDP")
    axes.set_ylim(bottom=0)
    axes.set_title("Memory")
    return _save(axes, path)


def draw_plan(forecast: Forecast, timeline: MemoryTimeline | None, path: Path) -> str:
    """Draw the planned memory of one step over its predicted time, and what was measured, which is slower for that."""
    axes = _axes("part of the step", "MB on this rank")
    prediction = forecast.plan.prediction
    if axes is None:
        return _MISSING
    if timeline is not None and timeline.milliseconds[-1]:
        parts = [each / timeline.milliseconds[-1] for each in timeline.milliseconds]
        megabytes = [nbytes / 1e6 for nbytes in timeline.nbytes]
        axes.fill_between(parts, megabytes, step="post", alpha=0.3, color="tab:blue", label="this run")
    if prediction is not None:
        curve = [(seconds / prediction.seconds, nbytes / 1e6) for seconds, nbytes in prediction.curve.points]
        axes.step(*_columns(curve), where="post", color="tab:orange", label="plan")
    axes.axhline(forecast.plan.costs.steps[-1].peak / 1e6, color="tab:red", linestyle="--", label="the plan's peak")
    axes.set_ylim(bottom=0)
    axes.set_title("Plan and run: memory of one step")
    return _save(axes, path)


def _axes(x: str, y: str) -> Any:
    """Axes of a new figure that needs no display, or None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return axes


def _save(axes: Any, path: Path) -> str:
    axes.legend()
    axes.figure.savefig(path, dpi=120)
    return str(path)


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    window = 20
    return [
        (points[i][0], sum(value for _, value in points[max(0, i - window + 1) : i + 1]) / min(window, i + 1))
        for i in range(len(points))
    ]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
