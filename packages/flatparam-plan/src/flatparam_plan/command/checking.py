"""A plan beside a real run: `flatparam plan --check`."""

from __future__ import annotations

from flatparam_plan.command.showing import write
from flatparam_plan.measuring import measure
from flatparam_plan.report import Plan
from flatparam_plan.training import TrainingProgram

__all__ = ["is_as_planned"]


def is_as_planned(program: TrainingProgram, plan: Plan, *, steps: int) -> bool:
    """Run the program for real, and show what the plan has wrong; returns whether nothing is."""
    real = measure(program, plan.setup, plan.setup.topology(), steps=steps)
    wrong = plan.costs.errors(real)
    for name, difference in wrong.items():
        write(f"{name}: planned {abs(difference):,} too {'many' if difference > 0 else 'few'}")
    if not wrong:
        write(f"\nchecked: it ran, and all {len(dict(real.facts()))} numbers are as planned")
    return not wrong
