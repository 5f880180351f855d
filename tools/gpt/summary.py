"""The table at the end of a run: what was held and moved, beside the formulas."""

from __future__ import annotations

from attrs import frozen

from .costs import Costs
from .report import in_units, table


@frozen
class Measured:
    """What the meter found, the largest over the ranks."""

    at_rest: int
    peak: int
    process_peak: int
    moved_per_step: int
    step_milliseconds: float


def summary(costs: Costs, measured: Measured) -> list[str]:
    """The table's lines. ``bytes`` columns carry exact numbers, so that they can be checked."""
    per = "1 rank" if costs.ranks == 1 else f"{costs.ranks} ranks"
    peak, above = "-", "not recorded: the run was stopped before its third step"
    if measured.peak:
        peak = f"{measured.peak:,}"
        above = f"{in_units(measured.peak - measured.at_rest)} above rest are activations and gathered units"
    rows = [
        ("parameters", f"{costs.shape.numel:,}", "", "", f"float32, on {per}"),
        (
            "bytes per rank at rest", f"{measured.at_rest:,}", f"{costs.held_at_rest:,}", f"{costs.held_by_ddp:,}",
            f"{costs.held_in_words()} / {costs.ranks} (parameters, gradients, optimizer)",
        ),
        (
            "bytes per rank at peak", peak, "", f"{costs.held_by_ddp:,} +", above,
        ),
        (
            "bytes moved per step", f"{measured.moved_per_step:,}", f"{costs.moved_per_step:,}",
            f"{costs.moved_by_ddp:,}", costs.moved_in_words(),
        ),
        ("process memory at peak", f"{measured.process_peak:,}", "", "", "with Python, torch's libraries, the text"),
        ("milliseconds per step", f"{measured.step_milliseconds:.1f}", "", "", "median on rank 0"),
    ]  # fmt: skip
    return table(("", "this run", "formula", "DDP", ""), rows)
