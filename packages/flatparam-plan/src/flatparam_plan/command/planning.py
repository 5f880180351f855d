"""`flatparam plan`: from its arguments to plans, and their tables."""

from __future__ import annotations

import argparse

from flatparam_files.command import ArgumentsError
from flatparam_plan.command.checking import is_as_planned
from flatparam_plan.command.models import program_of
from flatparam_plan.command.setups import setups_of
from flatparam_plan.command.showing import draw, side_by_side, write, write_json
from flatparam_plan.making import plans_of
from flatparam_plan.training import PlanError, Setup, TrainingProgram

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
        if chosen.json:
            facts = [plan.facts() for plan in plans]
            write_json(facts[0] if len(facts) == 1 else facts)
        elif len(plans) == 1:
            write(plans[0].table())
        else:
            write("\n".join(side_by_side(plans)))
        draw(chosen, plans[0])
        return 0 if not chosen.check or is_as_planned(program, plans[0], steps=chosen.steps) else 1
    except PlanError as error:
        raise ArgumentsError(str(error)) from error


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
    several = chosen.compare is not None or len(chosen.world) > 1
    for wrong, told in (
        (
            chosen.strategy and (chosen.compare or chosen.fit is not None),
            "--compare and --fit choose strategies: leave out --strategy",
        ),
        (
            chosen.wrap and chosen.wrap_numel,
            "units are either of classes or of a size: give --wrap or --wrap-numel",
        ),
        (
            several and (chosen.svg or chosen.trace),
            "a picture is of one plan: give one --world, and no --compare",
        ),
        (
            chosen.check and (several or chosen.fit is not None),
            "--check runs one setup: give one --world, and neither --compare nor --fit",
        ),
        (
            chosen.check and chosen.json,
            "--json is one JSON object, and --check writes for people: give one of them",
        ),
    ):
        if wrong:
            raise ArgumentsError(told)
    for path in (chosen.svg, chosen.trace):
        if path is not None and not path.parent.is_dir():
            raise ArgumentsError(
                f"expected a file in a folder that exists, found {str(path)!r}; make the folder first"
            )


def _fit(chosen: argparse.Namespace, program: TrainingProgram, setups: list[Setup]) -> int:
    from flatparam_plan.fitting.choosing import fit

    fitted = fit(program, setups[0], memory=chosen.fit, profile=chosen.profile)
    if chosen.json:
        write_json(fitted.facts())
    else:
        write(fitted.table())
    draw(chosen, fitted.best)
    return 0
