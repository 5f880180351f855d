"""Messages about many ranks are for people."""

from __future__ import annotations

import time

import pytest
import torch

from flatparam_comm import Collectives, RankError, WorldTimeout, run_threads
from flatparam_comm.testing import BRIEFLY


def _absent(world: Collectives) -> None:
    if world.rank != 55:
        world.all_reduce(torch.ones(4), label="4").wait()


def _different(world: Collectives) -> None:
    world.all_reduce(torch.ones(5 if world.rank == 55 else 4), label="4").wait()


def _slow(world: Collectives) -> None:
    if world.rank == 55:
        time.sleep(2 * BRIEFLY)
    world.all_reduce(torch.ones(4), label="4").wait()


def test_a_deadlock_of_many_ranks() -> None:
    """Ranks that wait at the same place are one entry, and sets of ranks are ranges."""
    with pytest.raises(RankError) as raised:
        run_threads(64, _absent)
    assert str(raised.value.__cause__) == (
        "rank 0: all_reduce '4': no rank can go on: ranks 0-54, 56-63 wait for all_reduce '4' (call 0 of the group of "
        "ranks [0-63]; not called by [55]); rank 55 has finished; make every rank call the same collectives in the same "
        "order"
    )


def test_a_mismatch_of_many_ranks() -> None:
    """Calls that are equal are one entry."""
    with pytest.raises(RankError) as raised:
        run_threads(64, _different)
    text = str(raised.value.__cause__)
    assert (
        "in call 0 of the group of ranks [0-63]: ranks 0-54, 56-63 called all_reduce '4' (sum, 4 x float32"
        in text
    )
    assert "; rank 55 called all_reduce '4' (sum, 5 x float32 on cpu); make every rank" in text
    assert len(text) < 400


def test_a_timeout_of_many_ranks() -> None:
    """The time limit's error has an entry for each place."""
    with pytest.raises(WorldTimeout) as raised:
        run_threads(64, _slow, timeout=BRIEFLY)
    text = str(raised.value)
    assert (
        "ranks 0-54 wait for all_reduce '4' (call 0 of the group of ranks [0-63]; not called by [55-63])"
        in text
    )
    assert "rank 55 is running " in text
    assert len(text) < 800


def test_few_ranks_are_named_one_by_one() -> None:
    """With two ranks nothing is shortened."""
    with pytest.raises(
        RankError, match=r"rank 0 waits for all_reduce '4' \(call 0 of the group of ranks \[0, 1\]; not"
    ):
        run_threads(
            2, lambda world: None if world.rank else world.all_reduce(torch.ones(4), label="4").wait()
        )
