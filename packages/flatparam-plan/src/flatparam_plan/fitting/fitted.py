"""The ways to train a program within a budget of memory, and which is the fastest."""

from __future__ import annotations

from typing import Any, final

import attrs

from flatparam.observing.table import columns, shown_nbytes, shown_seconds
from flatparam_plan.fitting.explaining import way_of
from flatparam_plan.report import Plan

__all__ = ["Fitted", "seconds_of"]


@final
@attrs.frozen(eq=False)
class Fitted:
    """The ways that were tried, the fastest that fits first, then the others that fit, then those that do not."""

    memory: int
    plans: tuple[Plan, ...]
    plain: Plan
    """The plan with each block as a unit that is freed after the forward pass."""
    choices: tuple[str, ...]
    """The choices, a line for each."""

    @property
    def best(self) -> Plan:
        """The fastest plan whose peak is within the budget."""
        return self.plans[0]

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's peak is within the budget."""
        return plan.peak.nbytes <= self.memory

    def table(self) -> str:
        """Every way that was tried, and what the first consists of."""
        rows = [["", "peak", "predicted step", "sent by a rank", ""]]
        for plan in self.plans:
            sent = shown_nbytes(plan.costs.steps[-1].sent_nbytes)
            verdict = "chosen" if plan is self.best else "fits" if self.fits(plan) else "does not fit"
            if plan.prediction is not None and plan.prediction.is_measured:
                verdict += ", measured"
            rows.append(
                [
                    way_of(plan.setup),
                    shown_nbytes(plan.peak.nbytes),
                    shown_seconds(seconds_of(plan)),
                    sent,
                    verdict,
                ]
            )
        lines = [f"budget {shown_nbytes(self.memory)} on each rank", "", *columns(rows)]
        if any("measured" in row[-1] for row in rows):
            lines += [
                "measured: from steps that were run here, in turn; the others from numbers that fit such steps"
            ]
        if self.best.prediction is not None:
            lines += [self.best.prediction.certainty]
        if self.best.notes:
            lines += ["", *self.best.notes]
        return "\n".join([*lines, "", *self.choices])

    def facts(self) -> dict[str, Any]:
        """The ways as plain values."""
        return {
            "memory": self.memory,
            "choices": list(self.choices),
            "ways": [
                {
                    "way": way_of(plan.setup),
                    "fits": self.fits(plan),
                    "chosen": plan is self.best,
                    **plan.facts(),
                }
                for plan in self.plans
            ],
        }


def seconds_of(plan: Plan) -> float:
    """The predicted time of a step; zero without a profile."""
    return 0.0 if plan.prediction is None else plan.prediction.seconds
