"""`flatparam plan`: from its arguments to plans, and their tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from flatparam.command.opening import ArgumentsError
from flatparam.command.plan.models import program_of
from flatparam.command.plan.setups import setups_of
from flatparam.observing.table import columns, shown_nbytes, shown_seconds
from flatparam.planning.costs import measure
from flatparam.planning.errors import PlanError
from flatparam.planning.making import plans_of
from flatparam.planning.plan import Plan
from flatparam.planning.program import TrainingProgram
from flatparam.planning.setup import Setup

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> int:
    """Plan what the arguments say; returns 1 if `--check` has found a difference."""
    _check_output(chosen)
    try:
        program = program_of(chosen)
        setups = setups_of(chosen)
        if chosen.fit is not None:
            return _fit(chosen, program, setups)
        plans = plans_of(program, setups, steps=chosen.steps, profile=chosen.profile)
    except PlanError as error:
        raise ArgumentsError(str(error)) from error
    if chosen.json:
        facts = [plan.facts() for plan in plans]
        _write(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
    elif len(plans) == 1:
        _write(plans[0].table())
    else:
        _write("\n".join(_side_by_side(plans)))
    _draw(chosen, plans[0])
    return _check(chosen, program, plans[0]) if chosen.check else 0


def _check_output(chosen: argparse.Namespace) -> None:
    """Refuse at once what would fail once everything is planned."""
    if chosen.profile is None and chosen.fit is not None:
        raise ArgumentsError("--fit chooses the fastest setup: give --profile")
    if chosen.profile is None and (chosen.svg or chosen.trace):
        raise ArgumentsError("a picture of a step needs its time: give --profile")
    if chosen.fit is not None and (chosen.compare or len(chosen.world) > 1):
        raise ArgumentsError(
            "--fit compares strategies itself, for one world size: give one --world, and no --compare"
        )
    for path in (chosen.svg, chosen.trace):
        if path is not None and not path.parent.is_dir():
            raise ArgumentsError(
                f"expected a file in a folder that exists, found {str(path)!r}; make the folder first"
            )


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _side_by_side(plans: list[Plan]) -> list[str]:
    """A line for each number, a column for each plan."""
    several_worlds = len({plan.setup.world_size for plan in plans}) > 1
    heads = [f"{plan.setup.world_size} ranks" if several_worlds else plan.setup.strategy for plan in plans]
    rows = [["", *heads]]

    def row(name: str, value: Callable[[Plan], str]) -> None:
        rows.append([name, *map(value, plans)])

    for what in ("parameters", "gradients", "states"):
        row(what, lambda plan, what=what: shown_nbytes(sum(getattr(plan.costs.resting, what).values())))  # type: ignore[misc]
    row("peak", lambda plan: shown_nbytes(plan.peak.nbytes))
    row("peak, bytes", lambda plan: f"{plan.peak.nbytes:,}")
    row("activations", lambda plan: shown_nbytes(plan.activation_nbytes))
    row("padding", lambda plan: shown_nbytes(sum(unit.facts.padding_nbytes for unit in plan.units)))
    row("collectives", lambda plan: str(sum(t.count for t in plan.costs.steps[-1].collectives.values())))
    row("sent by a rank", lambda plan: shown_nbytes(plan.costs.steps[-1].sent_nbytes))
    row("leaves a host", lambda plan: shown_nbytes(plan.links["to other hosts"]))
    if plans[0].prediction is not None:
        row("predicted step", lambda plan: shown_seconds(plan.prediction.seconds) if plan.prediction else "")
        row("bound by", lambda plan: plan.prediction.bound_by if plan.prediction else "")
    return columns(rows)


def _check(chosen: argparse.Namespace, program: TrainingProgram, plan: Plan) -> int:
    """Run the program for real and show where the plan is wrong."""
    real = measure(program, plan.setup, plan.setup.topology(), steps=chosen.steps)
    wrong = plan.costs.errors(real)
    for name, difference in wrong.items():
        _write(f"{name}: planned {difference:+,} too many")
    if not wrong:
        _write(f"\nchecked: it ran, and all {len(dict(real.facts()))} numbers are as planned")
    return 1 if wrong else 0


def _draw(chosen: argparse.Namespace, plan: Plan) -> None:
    for path, form in ((chosen.svg, "svg"), (chosen.trace, "json")):
        if path is not None:
            assert plan.prediction is not None, "there is a profile"
            path.write_text(plan.prediction.picture(form), encoding="utf-8")


def _fit(chosen: argparse.Namespace, program: TrainingProgram, setups: list[Setup]) -> int:
    from flatparam.planning.fitting.choosing import fit

    fitted = fit(program, setups[0], memory=chosen.fit, profile=chosen.profile)
    _write(json.dumps(fitted.facts(), indent=1) if chosen.json else fitted.table())
    _draw(chosen, fitted.best)
    return 0
