"""The arguments of `summon_full_params`, and the state of one unit's summoned parameters."""

from __future__ import annotations

from typing import final

import attrs

from flatparam_comm import FlatParamError


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

    def pin(self) -> None:
        """Count one more context that keeps full parameters in memory."""
        self.pins += 1

    def unpin(self) -> None:
        """Count one context less."""
        self.pins -= 1

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
