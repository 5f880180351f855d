"""The phases of a unit, and the legal steps between them."""

from __future__ import annotations

import enum
from typing import Final

from flatparam_comm import Transitions


class Phase(enum.Enum):
    """The phase of a unit; the residency of its handles tells what is in memory."""

    IDLE = "idle"
    FORWARD = "in one or more forward calls"
    BACKWARD = "between the gradient of its output and that of its parameters and inputs"
    REDUCING = "its gradients are on their way between ranks"
    INSPECTING = "its full parameters are shown to the user"

    # The hash of Enum is written in Python, and every step looks a phase up in a table.
    __hash__ = object.__hash__


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
