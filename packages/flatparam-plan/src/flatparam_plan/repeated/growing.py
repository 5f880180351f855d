"""The costs of many equal blocks, from those of few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from flatparam_comm import Totals
from flatparam_plan.costs import STAGES, Costs, Resting, StepCosts
from flatparam_plan.hollow import Log
from flatparam_plan.rehearsal import Entry

__all__ = ["Peaks", "grown_costs", "peaks", "peaks_of"]

Peaks: TypeAlias = "tuple[int, list[dict[str, int]]]"
"""The most bytes at once until the model is wrapped, and in the stages of each step."""


def grown_costs(
    base: Costs,
    longer: Sequence[Costs],
    blocks: Sequence[tuple[int, int]],
    laid_out: Peaks,
) -> Costs | None:
    """The costs of all blocks: peaks are those that were laid out, and the rest grows with the blocks.

    Args:
        base: the costs of few blocks of each run.
        longer: for each run, the costs of some more of its blocks.
        blocks: for each run, how many blocks `base` lacks, and how many more of them `longer` has.

    Returns:
        `None` if a number does not grow with the blocks.
    """
    all_facts = [dict(each.facts()) for each in longer]
    facts: dict[str, int] = {}
    for name, value in base.facts():
        for more, (lacking, step) in zip(all_facts, blocks, strict=True):
            difference = (more.get(name, 0) - dict(base.facts())[name]) * lacking
            if not name.startswith("peak") and difference % step:
                return None
            value += difference // step
        facts[name] = value
    building, peaks_of_steps = laid_out

    def resting(what: str) -> dict[str, int]:
        return {dtype: facts[f"{what} in {dtype}"] for dtype in getattr(base.resting, what)}

    steps = [
        StepCosts(
            peaks_of_steps[number],
            {
                op: Totals(
                    *(facts[f"{op} {what} in step {number + 1}"] for what in ("calls", "bytes", "bytes sent"))
                )
                for op in step.collectives
            },
        )
        for number, step in enumerate(base.steps)
    ]
    return Costs(
        Resting(resting("parameters"), resting("gradients"), resting("states")),
        building,
        tuple(steps),
        facts["left after the last step"],
    )


def peaks(entries: Sequence[Entry], log: Log, stop: int) -> Peaks:
    """The most bytes at once until the model is wrapped, and in the stages of each step."""
    stages = [entry for entry in entries if entry.kind == "stage"]
    ends = [*(entry.place for entry in stages[1:]), stop]
    building = 0
    steps: dict[int, dict[str, int]] = {}
    for entry, end in zip(stages, ends, strict=True):
        peak = log.peak(entry.place, end)
        if entry.stage in STAGES:
            of_step = steps.setdefault(entry.step, {})
            of_step[entry.stage] = max(of_step.get(entry.stage, 0), peak)
        elif entry.stage != "zero_grad":
            building = max(building, peak)
    return building, [steps[number] for number in sorted(steps)]


def peaks_of(costs: Costs) -> Peaks:
    """The same numbers, of costs."""
    return costs.building, [dict(step.peaks) for step in costs.steps]
