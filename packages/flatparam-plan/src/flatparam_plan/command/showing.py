"""The output of `flatparam plan`: tables, JSON and pictures."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from flatparam.observing.table import columns, shown_nbytes, shown_seconds
from flatparam_plan.report import Plan

__all__ = ["draw", "side_by_side", "write", "write_json"]


def write(text: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write(text + "\n")


def write_json(facts: Any) -> None:
    """Write facts to stdout."""
    write(json.dumps(facts, indent=1))


def side_by_side(plans: list[Plan]) -> list[str]:
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
    return [*columns(rows), *plans[0].notes]


def draw(chosen: Namespace, plan: Plan) -> None:
    """Draw the predicted step to the files that the arguments name."""
    for path, form in ((chosen.svg, "svg"), (chosen.trace, "json")):
        if path is not None:
            assert plan.prediction is not None, "there is a profile"
            path.write_text(plan.prediction.picture(form), encoding="utf-8")
