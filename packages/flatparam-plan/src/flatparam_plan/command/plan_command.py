"""`flatparam plan`: from its arguments to plans, and their tables, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from flatparam.observing.picture import columns, shown_nbytes, shown_seconds
from flatparam_files.command import ArgumentsError
from flatparam_plan.command.named_model import program_of
from flatparam_plan.costs import measure
from flatparam_plan.hardware.profile import device_of
from flatparam_plan.planner import plans_of
from flatparam_plan.report import Plan
from flatparam_plan.training import PlanError, Setup, TrainingProgram

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> int:
    """Plan what the arguments say; returns 1 if `--check` has found a difference."""
    _check_output(chosen)
    try:
        program = program_of(chosen)
        setups = _setups_of(chosen)
        if chosen.fit is not None:
            return _fit(chosen, program, setups)
        plans = plans_of(program, setups, steps=chosen.steps, profile=chosen.profile)
        if chosen.json:
            facts = [plan.facts() for plan in plans]
            _write_json(facts[0] if len(facts) == 1 else facts)
        elif len(plans) == 1:
            _write(plans[0].table())
        else:
            _write("\n".join(_side_by_side(plans)))
        _draw(chosen, plans[0])
        return 0 if not chosen.check or _is_as_planned(program, plans[0], steps=chosen.steps) else 1
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
    from flatparam_plan.fitting.fastest import fit

    fitted = fit(program, setups[0], memory=chosen.fit, profile=chosen.profile)
    if chosen.json:
        _write_json(fitted.facts())
    else:
        _write(fitted.table())
    _draw(chosen, fitted.best)
    return 0


# How the arguments of `flatparam plan` say that a program is to be run


def _setups_of(chosen: argparse.Namespace) -> list[Setup]:
    """One setup, or several to compare."""
    strategies = chosen.compare.split(",") if chosen.compare else [chosen.strategy or "full"]
    if len(strategies) > 1 and len(chosen.world) > 1:
        raise ArgumentsError("give either several world sizes or several strategies to compare")
    device = chosen.device or ("cpu" if chosen.profile is None else device_of(chosen.profile))
    if chosen.check and device != "cpu":
        raise ArgumentsError(
            "--check runs on this CPU, and the plan is of an accelerator's schedule: add --device cpu"
        )
    wrap: Any = tuple(chosen.wrap) if chosen.wrap else chosen.wrap_numel
    return [
        Setup(
            world_size=world,
            ranks_per_host=chosen.ranks_per_host,
            rank=chosen.rank,
            strategy=strategy,
            wrap=wrap,
            param_dtype=_dtype(chosen.dtype),
            reduce_dtype=_dtype(chosen.reduce_dtype),
            optimizer=chosen.optimizer,
            cpu_offload=chosen.offload,
            checkpointing=tuple(chosen.checkpointing),
            use_orig_params=chosen.use_orig_params,
            accumulate=chosen.accumulate,
            max_norm=chosen.clip,
            forward_prefetch=chosen.forward_prefetch,
            backward_prefetch=chosen.backward_prefetch,
            transport=chosen.transport,
            device=device,
        )
        for world in chosen.world
        for strategy in strategies
    ]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


# A plan beside a real run: `flatparam plan --check`


def _is_as_planned(program: TrainingProgram, plan: Plan, *, steps: int) -> bool:
    """Run the program for real, and show what the plan has wrong; returns whether nothing is."""
    real = measure(program, plan.setup, plan.setup.topology(), steps=steps)
    wrong = plan.costs.errors(real)
    for name, difference in wrong.items():
        _write(f"{name}: planned {abs(difference):,} too {'many' if difference > 0 else 'few'}")
    if not wrong:
        _write(f"\nchecked: it ran, and all {len(dict(real.facts()))} numbers are as planned")
    return not wrong


# The output of `flatparam plan`: tables, JSON and pictures


def _write(text: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write(text + "\n")


def _write_json(facts: Any) -> None:
    """Write facts to stdout."""
    _write(json.dumps(facts, indent=1))


def _side_by_side(plans: list[Plan]) -> list[str]:
    """Return a line for each number, a column for each plan."""
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
    return [*columns(rows), *plans[0].notes]


def _draw(chosen: argparse.Namespace, plan: Plan) -> None:
    """Draw the predicted step to the files that the arguments name."""
    for path, form in ((chosen.svg, "svg"), (chosen.trace, "json")):
        if path is not None:
            assert plan.prediction is not None, "there is a profile"
            path.write_text(plan.prediction.picture(form), encoding="utf-8")
