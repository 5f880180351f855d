"""Plans predict the cost of a program on its ranks; they run it without memory and without communication.

The names are imported on first use, so that the command line can answer without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_plan.costs import measure
    from flatparam_plan.plan_error import PlanError
    from flatparam_plan.planned_policy import PlannedPolicy, planned
    from flatparam_plan.planner import plan
    from flatparam_plan.recorder import trace
    from flatparam_plan.report import Plan
    from flatparam_plan.training import Setup, TrainingProgram, train

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "PlanError",
    "PlannedPolicy",
    "Setup",
    "TrainingProgram",
    "measure",
    "plan",
    "planned",
    "trace",
    "train",
]


_HOMES = {
    "flatparam_plan.plan_error": ("PlanError",),
    "flatparam_plan.planner": ("plan",),
    "flatparam_plan.costs": ("measure",),
    "flatparam_plan.planned_policy": ("PlannedPolicy", "planned"),
    "flatparam_plan.recorder": ("trace",),
    "flatparam_plan.report": ("Plan",),
    "flatparam_plan.training": ("Setup", "TrainingProgram", "train"),
}
"""The modules that have the names which this package exports."""
__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
