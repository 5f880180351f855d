"""What is asked of `summon_full_params`, and what is summoned of one unit."""

from __future__ import annotations

import attrs
from typing_extensions import final

__all__ = ["Summoned", "Wishes"]


@final
@attrs.frozen
class Wishes:
    """What a caller asks of `summon_full_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    @property
    def is_copied(self) -> bool:
        """Whether full parameters are shown in memory of their own, with which nothing can be computed."""
        return self.rank0_only or self.with_grads

    def shows(self, other: Wishes) -> bool:
        """Whether what is shown for these wishes is enough for `other`."""
        return (other.rank0_only or not self.rank0_only) and (self.with_grads or not other.with_grads)


@final
@attrs.define(eq=False)
class Summoned:
    """Which full parameters of a unit are summoned."""

    wishes: Wishes | None = None
    """What the outermost context asked for; `None` outside of all."""
    pins: int = 0
    """How many contexts keep the full parameters that the unit computes with in memory, in full precision."""
    _stamp: int = 0
    """The stamp of the shards when they were last the same as what is summoned."""

    def begin(self, wishes: Wishes, stamp: int = 0) -> None:
        """The outermost context shows what `wishes` says, of shards with this stamp."""
        self.wishes, self._stamp = wishes, stamp

    def end(self) -> None:
        """The outermost context is left."""
        self.wishes = None

    def pin(self) -> None:
        """One more context keeps full parameters in memory."""
        self.pins += 1

    def unpin(self) -> None:
        """One context less."""
        self.pins -= 1

    def is_of(self, stamp: int) -> bool:
        """Whether the shards, with this stamp, are those that are summoned."""
        return stamp == self._stamp

    def are_written(self, stamp: int) -> None:
        """The shards, which have got this stamp by it, are again the same as what is summoned."""
        self._stamp = stamp
