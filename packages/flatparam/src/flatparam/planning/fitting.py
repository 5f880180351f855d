"""The fastest way to train a program within a budget of memory, found by planning every way that is worth trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam.observing.table import columns, shown_nbytes, shown_seconds
from flatparam.planning.errors import PlanError
from flatparam.planning.plan import Plan, plan_of
from flatparam.planning.profile import Profile, profile_named
from flatparam.planning.program import TrainingProgram
from flatparam.planning.setup import Setup

__all__ = ["Fitted", "fit"]

_STRATEGIES: Final = ("full", "grad_op", "hybrid", "hybrid_grad_op")


@final
@attrs.frozen(eq=False)
class Fitted:
    """The ways that were tried, the fastest that fits first, then the others that fit, then those that do not."""

    memory: int
    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan:
        """The fastest plan whose peak is within the budget."""
        return self.plans[0]

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's peak is within the budget."""
        return plan.peak.nbytes <= self.memory

    def table(self) -> str:
        """Every way that was tried, and why the first was chosen."""
        rows = [["", "peak", "predicted step", "sent by a rank", ""]]
        for plan in self.plans:
            seconds = 0.0 if plan.prediction is None else plan.prediction.seconds
            sent = shown_nbytes(plan.costs.steps[-1].sent_nbytes)
            verdict = "chosen" if plan is self.best else "fits" if self.fits(plan) else "does not fit"
            rows.append(
                [_way(plan.setup), shown_nbytes(plan.peak.nbytes), shown_seconds(seconds), sent, verdict]
            )
        return "\n".join([f"budget {shown_nbytes(self.memory)} on each rank", "", *columns(rows)])

    def facts(self) -> dict[str, Any]:
        """The ways as plain values."""
        return {
            "memory": self.memory,
            "ways": [
                {
                    "way": _way(plan.setup),
                    "fits": self.fits(plan),
                    "chosen": plan is self.best,
                    **plan.facts(),
                }
                for plan in self.plans
            ],
        }


def _way(setup: Setup) -> str:
    parts = [setup.strategy]
    if setup.checkpointing:
        parts.append(f"checkpointing {', '.join(setup.checkpointing)}")
    return ", ".join(parts)


def fit(program: TrainingProgram, setup: Setup, *, memory: int, profile: str | Path | Profile) -> Fitted:
    """Plan `program` with every strategy, with and without recomputing the activations of its units.

    Args:
        setup: what is not varied. If it wraps by names of classes, these are what may be checkpointed.
        memory: the most bytes that a rank may have in use at once.
        profile: the hardware, for the time of a step.

    Raises:
        PlanError: if no way fits; the message says how much the smallest takes.
    """
    chosen = profile_named(profile)
    found = [plan_of(program, each, profile=chosen) for each in _ways(setup)]
    order = sorted(
        found,
        key=lambda plan: (
            plan.peak.nbytes > memory,
            plan.peak.nbytes
            if plan.peak.nbytes > memory or plan.prediction is None
            else plan.prediction.seconds,
        ),
    )
    if order[0].peak.nbytes > memory:
        least = order[0]
        raise PlanError(
            f"expected a way to train with a peak of at most {memory:,} bytes on each rank, found that the smallest, "
            f"{_way(least.setup)}, takes {least.peak.nbytes:,}; take more ranks, a smaller batch, smaller units, or "
            "offload the shards"
        )
    return Fitted(memory, tuple(order))


def _ways(setup: Setup) -> list[Setup]:
    """The setups that are worth trying, what was asked for among them."""
    strategies = [setup.strategy]
    for name in _STRATEGIES:
        inside = setup.ranks_per_host
        if name.startswith("hybrid"):
            if setup.world_size <= inside or setup.world_size % inside:
                continue
            name = f"{name}:{inside}"
        if name not in strategies:
            strategies.append(name)
    names = (setup.wrap,) if isinstance(setup.wrap, str) else setup.wrap
    units = tuple(names) if isinstance(names, tuple) and all(isinstance(each, str) for each in names) else ()
    recomputed = [setup.checkpointing]
    recomputed += [each for each in ((), units) if each not in recomputed]
    return [
        attrs.evolve(setup, strategy=strategy, checkpointing=checkpointing)
        for strategy in strategies
        for checkpointing in recomputed
    ]
