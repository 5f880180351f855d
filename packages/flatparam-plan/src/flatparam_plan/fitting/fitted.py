"""The ways to train a program within a budget of memory: which is the fastest, and each in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs

from flatparam_files.command import shown_nbytes
from flatparam_plan.named_units import NamedUnits
from flatparam_plan.picture import columns, shown_seconds
from flatparam_plan.report import Plan, UnitCosts
from flatparam_plan.training import Setup


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
        """Return whether the plan's peak is within the budget."""
        return plan.peak.nbytes <= self.memory

    def table(self) -> str:
        """Return every way that was tried, and what the first consists of."""
        rows = [["", "peak", "predicted step", "sent by a rank", ""]]
        for plan in self.plans:
            sent = shown_nbytes(plan.costs.steps[-1].sent_nbytes)
            verdict = "chosen" if plan is self.best else "fits" if self.fits(plan) else "does not fit"
            if plan.prediction is not None and plan.prediction.is_measured:
                verdict += ", measured"
            rows.append(
                [way_of(plan.setup), shown_nbytes(plan.peak.nbytes), shown_seconds(seconds_of(plan)), sent, verdict]
            )
        lines = [f"budget {shown_nbytes(self.memory)} on each rank", "", *columns(rows)]
        if any("measured" in row[-1] for row in rows):
            lines += ["measured: from steps that were run here, in turn; the others from numbers that fit such steps"]
        if self.best.prediction is not None:
            lines += [self.best.prediction.certainty]
        if self.best.notes:
            lines += ["", *self.best.notes]
        return "\n".join([*lines, "", *self.choices])

    def facts(self) -> dict[str, Any]:
        """Return the ways as plain values."""
        return {
            "memory": self.memory,
            "choices": list(self.choices),
            "ways": [
                {"way": way_of(plan.setup), "fits": self.fits(plan), "chosen": plan is self.best, **plan.facts()}
                for plan in self.plans
            ],
        }


def seconds_of(plan: Plan) -> float:
    """Return the predicted time of a step; zero without a profile."""
    return 0.0 if plan.prediction is None else plan.prediction.seconds


# A plan's setup in words: a line for each choice


def way_of(setup: Setup) -> str:
    """Return a setup in a few words."""
    parts = [setup.strategy]
    if isinstance(setup.wrap, NamedUnits):
        parts.append(f"{len(setup.wrap.frees)} units")
        if setup.wrap.kept:
            parts.append(f"{len(setup.wrap.kept)} kept")
        if setup.wrap.forward_prefetch is not None:
            parts.append(f"{setup.wrap.forward_prefetch} ahead")
    if setup.checkpointing:
        names = setup.checkpointing
        parts.append(
            f"checkpointing {', '.join(names) if len(names) < 3 else f'{names[0]} ... {names[-1]} ({len(names)})'}"
        )
    return ", ".join(parts)


def choices_of(plan: Plan, before: Plan, plain: Plan, memory: int) -> tuple[str, ...]:
    """Return the choices, a line for each.

    Args:
        before: the same plan with every unit freed after the forward pass.
        plain: the plan with each block as a unit that is freed, which the last line compares with.
        memory: the budget.
    """
    gathers = {unit.facts.name: unit.gathers for unit in before.units}
    lines = [f"strategy {plan.setup.strategy} on {plan.setup.world_size} ranks"]
    groups: list[list[UnitCosts]] = []
    for unit in plan.units[1:]:
        if groups and _choice(groups[-1][0], gathers) == _choice(unit, gathers):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    for group in groups:
        told = "whole on each rank" if plan.setup.shard_size == 1 else _told(group, gathers)
        lines.append(f"{_named([unit.facts.name for unit in group])}: {told}")
    root = plan.units[0].facts
    if root.numel:
        lines.append(f"{root.name}: the other parameters, full from the forward to the end of the backward pass")
    names = plan.setup.checkpointing
    if names:
        lines.append(f"activations recomputed: {_named(names)}")
    if isinstance(plan.setup.wrap, NamedUnits) and plan.setup.wrap.forward_prefetch is not None:
        lines.append(f"forward_prefetch={plan.setup.wrap.forward_prefetch}")
    return (*lines, _beside(plan, plain, memory))


def _choice(unit: UnitCosts, gathers: dict[str, int]) -> tuple[str, bool, int]:
    parent, _, _ = unit.facts.name.partition(".")
    saved = gathers.get(unit.facts.name, unit.gathers) - unit.gathers
    return (parent, unit.facts.frees_after_forward, saved)


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _told(group: Sequence[UnitCosts], gathers: dict[str, int]) -> str:
    if group[0].facts.frees_after_forward:
        return "freed after forward"
    more = sum(unit.facts.full_nbytes for unit in group)
    fewer = sum(gathers.get(unit.facts.name, unit.gathers) - unit.gathers for unit in group)
    return f"kept after forward: +{shown_nbytes(more)}, -{fewer} gather{'s' * (fewer != 1)}"


def _beside(plan: Plan, plain: Plan, memory: int) -> str:
    mine, theirs = (0.0 if each.prediction is None else each.prediction.seconds for each in (plan, plain))
    return (
        f"predicted step {shown_seconds(mine)}, peak {shown_nbytes(plan.peak.nbytes)}; each block freed, with "
        f"{plain.setup.strategy}: {shown_seconds(theirs)}, peak {shown_nbytes(plain.peak.nbytes)}"
        f"{', which does not fit' if plain.peak.nbytes > memory else ''}"
    )
