"""Messages about many ranks are for people."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        "rank 0: all_reduce '4': no rank can go on:\n"
        "  ranks 0-54, 56-63 wait for all_reduce '4' (call 0 of the group of ranks [0-63]; not called by [55])\n"
        "  rank 55 has finished\n"
        "make every rank call the same collectives in the same order"
    )


def test_a_mismatch_of_many_ranks() -> None:
    """Calls that are equal are one entry."""
    with pytest.raises(RankError) as raised:
        run_threads(64, _different)
    text = str(raised.value.__cause__)
    assert (
        "in call 0 of the group of ranks [0-63]:\n  ranks 0-54, 56-63 called all_reduce '4' (sum, 4 x float32" in text
    )
    assert "\n  rank 55 called all_reduce '4' (sum, 5 x float32 on cpu)\nmake every rank" in text
    assert len(text) < 400


def test_a_timeout_of_many_ranks() -> None:
    """The time limit's error has an entry for each place."""
    with pytest.raises(WorldTimeout) as raised:
        run_threads(64, _slow, timeout=BRIEFLY)
    text = str(raised.value)
    assert "ranks 0-54 wait for all_reduce '4' (call 0 of the group of ranks [0-63]; not called by [55-63])" in text
    assert "rank 55 is running " in text
    assert len(text) < 800


def test_many_different_ranks() -> None:
    """Of ranks that all say something else, the first are named and the others counted."""

    def each(world: Collectives) -> None:
        world.all_reduce(torch.ones(1 + world.rank), label="4").wait()

    with pytest.raises(RankError) as raised:
        run_threads(64, each)
    lines = str(raised.value.__cause__).splitlines()
    assert lines[8] == "  rank 7 called all_reduce '4' (sum, 8 x float32 on cpu)"
    assert lines[9] == "  56 more, which differ from these"
    assert len(lines) == 11


def test_few_ranks_are_named_one_by_one() -> None:
    """With two ranks nothing is shortened."""
    with pytest.raises(
        RankError, match=r"rank 0 waits for all_reduce '4' \(call 0 of the group of ranks \[0, 1\]; not"
    ):
        run_threads(2, lambda world: None if world.rank else world.all_reduce(torch.ones(4), label="4").wait())


class _Counting(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operations(size: int) -> int:
    def work(world: Collectives) -> int:
        shard, full = torch.ones(2), torch.ones(2 * size)
        with _Counting() as counting:
            world.all_gather(torch.empty(2 * size), shard).wait()
            world.reduce_scatter(shard, full).wait()
            world.all_reduce(shard).wait()
        return counting.count

    return sum(run_threads(size, work))


def test_the_work_grows_with_the_ranks() -> None:
    """Twice as many threads make twice as many operations on tensors, so that hundreds of ranks end soon."""
    assert _operations(32) <= 2 * _operations(16) + 16
