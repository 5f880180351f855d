"""Which rank warns of ranks that stay at different collectives, when, and how often."""

from __future__ import annotations

from flatparam_guard.positions import Position, Standing
from flatparam_guard.waits import StallWatch

NAME = "a group"


def standings(*numbers: int) -> dict[int, Standing]:
    """Ranks from 0 on that have issued so many collectives."""
    return {
        rank: Standing(number, "barrier", Position("barrier") if number else None, f"process {rank}")
        for rank, number in enumerate(numbers)
    }


def test_the_lowest_of_the_furthest_ranks_warns_once() -> None:
    """Rank 1 warns when the patience is over, and not again before a rank has gone on."""
    watch = StallWatch(1, 10.0)
    assert watch.look(NAME, standings(3, 5, 5, 0), 0.0) is None
    assert watch.look(NAME, standings(3, 5, 5, 0), 9.0) is None
    told = watch.look(NAME, standings(3, 5, 5, 0), 10.0)
    assert told is not None
    assert told.startswith("for 10 s no rank of this host has gone on, and those of group 'a group' have issued")
    assert "rank 3 has issued none (process 3)" in told
    assert "what is behind, [0, 3], computes" in told
    assert watch.look(NAME, standings(3, 5, 5, 0), 30.0) is None
    assert watch.look(NAME, standings(4, 5, 5, 0), 31.0) is None
    assert watch.look(NAME, standings(4, 5, 5, 0), 41.0) is not None


def test_others_say_nothing() -> None:
    """A rank that is behind, or as far as a lower one, leaves the warning to that one."""
    for rank in (0, 2, 3):
        watch = StallWatch(rank, 10.0)
        assert watch.look(NAME, standings(3, 5, 5, 0), 0.0) is None
        assert watch.look(NAME, standings(3, 5, 5, 0), 100.0) is None


def test_ranks_that_rest_together_are_no_stall() -> None:
    """Nobody warns if all ranks have issued the same collectives, however long nothing happens."""
    watch = StallWatch(0, 10.0)
    assert watch.look(NAME, standings(5, 5), 0.0) is None
    assert watch.look(NAME, standings(5, 5), 1000.0) is None
