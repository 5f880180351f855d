"""The phases of a unit, the legal steps between them, and what is shown of a unit while it is at rest."""

from __future__ import annotations

import enum
from typing import Final, final

import attrs

from flatparam_comm import FlatParamError, Transitions


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


# Full parameters outside of passes


@final
@attrs.frozen
class Wishes:
    """The arguments that a caller passes to `summon_full_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    @property
    def is_copied(self) -> bool:
        """Whether full parameters are shown as copies, with which the module cannot compute."""
        return self.rank0_only or self.with_grads

    def shows(self, other: Wishes) -> bool:
        """Return whether a context with these wishes shows enough for `other`."""
        return (other.rank0_only or not self.rank0_only) and (self.with_grads or not other.with_grads)


@final
@attrs.define(eq=False)
class Summoned:
    """The state of a unit's full parameters outside of passes: summoned, or gathered by a caller."""

    wishes: Wishes | None = None
    """The arguments of the outermost context; `None` outside of every context."""
    pins: int = 0
    """The number of contexts that keep the unit's own full parameters in memory, in full precision."""
    are_held: bool = False
    """Whether a caller gathered the full parameters outside of passes, for the next pass to use."""
    away: str = ""
    """The place of the shards while the model is offloaded, for messages; empty while it is not."""
    _stamp: int = 0
    """The stamp of the shards when they last equalled the summoned parameters."""

    def begin(self, wishes: Wishes, stamp: int = 0) -> None:
        """Enter the outermost context, with these `wishes`; the shards have this stamp."""
        self.wishes, self._stamp = wishes, stamp

    def end(self) -> None:
        """Leave the outermost context."""
        self.wishes = None

    def pin(self, more: int = 1) -> None:
        """Count one more context that keeps full parameters in memory, or one less (-1)."""
        self.pins += more

    def hold(self, held: bool) -> None:
        """Note that a caller has gathered the full parameters, or that they are freed."""
        self.are_held = held

    def check_here(self, unit: str, rank: int) -> None:
        """Check that the shards of `unit` are where it computes.

        Raises:
            FlatParamError: while the model is offloaded.
        """
        if self.away:
            raise FlatParamError(
                f"unit {unit!r}, rank {rank}: its parameters are offloaded to {self.away}, so they cannot be gathered: "
                "call flatparam.onload(model) on every rank first"
            )

    def is_of(self, stamp: int) -> bool:
        """Return whether shards with this stamp equal the shards that were summoned."""
        return stamp == self._stamp

    def are_written(self, stamp: int) -> None:
        """Note that the summoned parameters were written to the shards, which got this stamp by it."""
        self._stamp = stamp
