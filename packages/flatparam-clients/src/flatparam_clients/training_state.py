"""FSDP1's names for what a wrapper and its flat parameter are doing."""

from __future__ import annotations

import enum

from flatparam.compat import LikeTorchs
from flatparam_comm import Residency
from flatparam_runtime import Phase, Unit

__all__ = ["HandleTrainingState", "TrainingState"]


class TrainingState(LikeTorchs):
    """The state of a wrapper; the members are FSDP1's."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()

    @classmethod
    def of(cls, unit: Unit) -> TrainingState:
        """Return the state of the wrapper of `unit`."""
        if unit.showing.wishes is not None or unit.phase is Phase.INSPECTING:
            return cls.SUMMON_FULL_PARAMS
        return cls.IDLE if unit.phase is Phase.IDLE else cls.FORWARD_BACKWARD


class HandleTrainingState(LikeTorchs):
    """The state of a flat parameter; the members are FSDP1's."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()

    @classmethod
    def of(cls, unit: Unit) -> HandleTrainingState:
        """Return the state of the flat parameters of `unit`."""
        if TrainingState.of(unit) is TrainingState.SUMMON_FULL_PARAMS:
            return cls.SUMMON_FULL_PARAMS
        if unit.phase is Phase.BACKWARD:
            return cls.BACKWARD_PRE if unit.residency is Residency.UNSHARDED else cls.BACKWARD_POST
        return {Phase.FORWARD: cls.FORWARD, Phase.REDUCING: cls.BACKWARD_POST}.get(unit.phase, cls.IDLE)
