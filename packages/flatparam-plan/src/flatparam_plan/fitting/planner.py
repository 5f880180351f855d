"""Plans of one program in many setups, from few of its blocks if they repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import attrs

from flatparam_plan.hardware import Profile
from flatparam_plan.making import plan_from
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.repeated import Template, rehearse_repeated
from flatparam_plan.report import Plan
from flatparam_plan.training import Setup, TrainingProgram
from flatparam_plan.units import Outline, outline_of

__all__ = ["Planner"]


@final
@attrs.define(eq=False)
class Planner:
    """Makes plans of a program on some hardware."""

    program: TrainingProgram
    profile: Profile
    template: Template | None = None
    """The model on the meta device, if that is where the program makes it."""
    has_planned: Callable[[], None] = attrs.field(default=lambda: None, init=False)
    """Is called after each plan, which stays."""

    def begin(self) -> Outline:
        """The modules of the program's model. If their blocks repeat, few of them are rehearsed from now on."""
        outline, model = outline_of(self.program)
        self.template = None if model is None else Template(model)
        return outline

    def plan(self, setup: Setup) -> Plan:
        """The plan of the program, from few of its blocks if they repeat."""
        found = None
        if self.template is not None:
            found = rehearse_repeated(self.program, self.template, setup)
        if found is None:
            found = rehearse(self.program, setup)
        plan = plan_from(found, profile=self.profile)
        self.has_planned()
        return plan

    def whole(self, setup: Setup) -> Plan:
        """The plan of the program, from all of its blocks."""
        return plan_from(rehearse(self.program, setup), profile=self.profile)
