"""A group that only says which rank this is, and of how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_comm import CollectiveError, RanksOnly, SingleCollectives, resolve_topology


class Ranks:
    """The stand-in that tests of wrapping pass as a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_it_is_taken_as_a_group() -> None:
    """A stand-in of several ranks is the shard group, alone or in a pair; one of a single rank is a world of one."""
    topology = resolve_topology(Ranks(1, 3))
    assert (topology.shard.rank, topology.shard.size, topology.replicate) == (1, 3, None)
    pair = resolve_topology((Ranks(0, 2), Ranks(1, 4)))
    assert pair.replicate is not None
    assert (pair.shard.size, pair.replicate.size, pair.replicate.rank) == (2, 4, 1)
    assert isinstance(resolve_topology(Ranks(0, 1)).shard, SingleCollectives)
    assert resolve_topology(group := Ranks(0, 2)).shard == RanksOnly(group)


CALLS: dict[str, Callable[[RanksOnly], Any]] = {
    "all_gather": lambda group: group.all_gather(torch.empty(4), torch.empty(2), label="here"),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.empty(2), torch.empty(4), label="here"),
    "all_reduce": lambda group: group.all_reduce(torch.empty(2), label="here"),
    "broadcast": lambda group: group.broadcast(torch.empty(2), label="here"),
    "exchange": lambda group: group.exchange(1, label="here"),
    "barrier": lambda group: group.barrier(label="here"),
    "subgroup": lambda group: group.subgroup([0]),
}


@each_row("name", CALLS)
def test_whatever_communicates_is_refused(name: str) -> None:
    """Each collective is an error with the rank, the call, what was found and what was expected."""
    with pytest.raises(CollectiveError, match=rf"rank 1: {name}.*found a Ranks, .*ProcessGroup") as caught:
        CALLS[name](RanksOnly(Ranks(1, 2)))
    assert (caught.value.rank, caught.value.op) == (1, name)


@each_row("given", [torch.ones(1), object(), type("Half", (), {"rank": 0, "size": 2})()])
def test_what_does_not_have_both(given: object) -> None:
    """A tensor has a size and no rank, and numbers are not methods: neither is a group."""
    with pytest.raises(TypeError, match="expected None, 'auto'"):
        resolve_topology(given)  # type: ignore[arg-type]
