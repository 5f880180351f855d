"""A plan's setup in words: a line for each choice."""

from __future__ import annotations

from collections.abc import Sequence

from flatparam.observing.table import shown_nbytes, shown_seconds
from flatparam_plan.report import Plan, UnitCosts
from flatparam_plan.training import Setup
from flatparam_plan.units import NamedUnits

__all__ = ["choices_of", "way_of"]


def way_of(setup: Setup) -> str:
    """A setup in a few words."""
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
    """The choices, a line for each.

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
        lines.append(
            f"{root.name}: the other parameters, full from the forward to the end of the backward pass"
        )
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
