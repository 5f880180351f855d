"""What a unit is doing, and what it may do next."""

from __future__ import annotations

import enum
from typing import Final

from flatparam_comm import Transitions

__all__ = ["PHASES", "Phase"]


class Phase(enum.Enum):
    """What a unit is doing; what is in memory is the handles' residency."""

    IDLE = "idle"
    FORWARD = "in one or more forward calls"
    BACKWARD = "between the gradient of its output and that of its parameters and inputs"
    REDUCING = "its gradients are on their way between ranks"
    INSPECTING = "its full parameters are shown to the user"

    __hash__ = object.__hash__  # Enum's own is written in Python, and a table is looked up at every step


PHASES: Final = Transitions(
    "phase",
    {
        Phase.IDLE: frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.REDUCING, Phase.INSPECTING}),
        Phase.FORWARD: frozenset({Phase.IDLE}),
        Phase.BACKWARD: frozenset({Phase.IDLE, Phase.REDUCING}),
        Phase.REDUCING: frozenset({Phase.IDLE}),
        Phase.INSPECTING: frozenset({Phase.IDLE}),
    },
)
