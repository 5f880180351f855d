"""Ranks of a host that stay at different collectives: a warning in the log lists what each of them has issued.

A backend that waits on the device, as NCCL does, says nothing until its own timeout; then it is too late to look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs

from flatparam_comm.rank_texts import told_by_ranks, told_ranks
from flatparam_guard.positions.standing import Standing

__all__ = ["StallWatch"]


@final
@attrs.define
class _Seen:
    """The numbers of collectives that the ranks of a group had issued, since a moment."""

    counts: dict[int, int]
    since: float
    is_told: bool = False


@final
@attrs.define(eq=False)
class StallWatch:
    """Remembers how far the ranks of each group were, and since when."""

    rank: int
    patience: float
    """The seconds that ranks may stay at different collectives."""
    _groups: dict[str, _Seen] = attrs.field(factory=dict)

    def look(self, name: str, ranks: Mapping[int, Standing], now: float) -> str | None:
        """The warning about the group `name`, if its ranks have not moved for long and are at different collectives.

        One rank of a host warns, and once: the lowest of those that are furthest.

        Args:
            ranks: the last collective of each rank of this host, this one too, by its number in the world.
            now: the time in seconds.
        """
        counts = {rank: standing.number for rank, standing in ranks.items()}
        seen = self._groups.get(name)
        if seen is None or seen.counts != counts:
            self._groups[name] = _Seen(counts, now)
            return None
        furthest = max(counts.values())
        is_mine = self.rank == min(rank for rank, count in counts.items() if count == furthest)
        if (
            seen.is_told
            or not is_mine
            or min(counts.values()) == furthest
            or now < seen.since + self.patience
        ):
            return None
        seen.is_told = True
        late = [rank for rank, count in counts.items() if count < furthest]
        claim = (
            f"for {self.patience:g} s no rank of this host has gone on, and those of group {name!r} have issued "
            "different numbers of collectives"
        )
        rows = [(rank, f"has issued {standing}") for rank, standing in sorted(ranks.items())]
        advice = (
            f"what is behind, {told_ranks(late)}, computes, loads data, writes a file, or does not make the call that "
            "the others wait in: look at where it is, by `py-spy dump --pid`, say"
        )
        return told_by_ranks(claim, rows, advice)
