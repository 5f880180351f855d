"""Ranks that issue different collectives over gloo: an error on each of them, and no process ends inside gloo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flatparam_comm import MismatchError, Pending, ProcessGroupCollectives, ReduceOp
from flatparam_comm.checks import Site
from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_guard.positions import PAGE_NBYTES, Page, _pages, code_of
from flatparam_guard.process import _NOW

pytestmark = pytest.mark.processes


def _gather(comm: ProcessGroupCollectives, numel: int = 1000, dtype: torch.dtype = torch.float32) -> Pending:
    output = torch.empty(comm.size * numel, dtype=dtype)
    return comm.all_gather(output, torch.ones(numel, dtype=dtype), label="unit")


def _scatter(comm: ProcessGroupCollectives, op: ReduceOp = ReduceOp.SUM) -> Pending:
    return comm.reduce_scatter(torch.empty(1000), torch.ones(comm.size * 1000), op=op, label="unit")


CALLS: dict[str, Callable[[ProcessGroupCollectives], Pending | None]] = {
    "a longer unit": lambda comm: _gather(comm, 100_000),
    "a shorter unit": lambda comm: _gather(comm, 10),
    "a different dtype": lambda comm: _gather(comm, dtype=torch.bfloat16),
    "a reduction": _scatter,
    "a maximum": lambda comm: _scatter(comm, ReduceOp.MAX),
    "an all-reduce": lambda comm: comm.all_reduce(torch.ones(100_000)),
    "a broadcast": lambda comm: comm.broadcast(torch.ones(1000), root=0),
    "a broadcast from 1": lambda comm: comm.broadcast(torch.ones(1000), root=1),
    "an exchange": lambda comm: comm.exchange("x" * 100_000) and None,  # type: ignore[func-returns-value]
    "a barrier": lambda comm: comm.barrier(),
}


def _diverge(comm: ProcessGroupCollectives, directory: str, usual: str, different: str) -> None:
    with pytest.raises(MismatchError) as raised:
        # The last of these may still be under way on a rank when the others part.
        for _ in range(30):
            pending = CALLS["a reduction"](comm)
            assert pending is not None
            pending.wait()
        # The rank that comes first may run ahead.
        for _ in range(3):
            pending = CALLS[different if comm.rank == 1 else usual](comm)
            if pending is not None:
                pending.wait()
    with pytest.raises(MismatchError, match="the process group is broken"):
        _gather(comm)
    Path(directory, f"rank-{comm.rank}").write_text(str(raised.value))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("usual", "different"),
    [
        ("a longer unit", "a shorter unit"),
        ("a shorter unit", "a longer unit"),
        ("a shorter unit", "a different dtype"),
        ("a longer unit", "a reduction"),
        ("a reduction", "a longer unit"),
        ("a reduction", "a maximum"),
        ("an all-reduce", "a shorter unit"),
        ("a broadcast", "a broadcast from 1"),
        ("an exchange", "a barrier"),
        ("a barrier", "an all-reduce"),
        ("a longer unit", "an exchange"),
    ],
)
def test_every_rank_raises(tmp_path: Path, usual: str, different: str, size: int) -> None:
    """Whatever two calls meet, each rank raises MismatchError that names both, and the next call raises again."""
    run_processes(size, _diverge, str(tmp_path), usual, different)
    for rank in range(size):
        told = (tmp_path / f"rank-{rank}").read_text()
        assert "ranks diverge at collective 31 of group" in told
        assert "rank 1 " in told
        assert "make every rank call the same" in told


def test_a_page_that_a_different_group_has_now() -> None:
    """A rank that left a group is compared no longer, whatever a later group of its own writes on the page."""
    memory = [memoryview(bytearray(PAGE_NBYTES)).cast("q") for _ in range(2)]
    mine, theirs = Page(7, memory[0]), Page(7, memory[1])
    mine.found = [(1, memory[1])]
    site = Site(0, 2, "all_reduce", "unit")
    code = code_of("all_reduce", torch.float32, 0)
    theirs.enter(1, site, code, 10)
    assert mine.enter(1, site, code, 11) == (1, code, 10)
    theirs.leave()
    assert mine.enter(1, site, code, 11) is None
    Page(8, memory[1]).enter(2, site, code, 10)
    assert mine.enter(2, site, code, 11) is None


def _makes_many_groups(comm: ProcessGroupCollectives) -> None:
    comm.barrier()
    relay = _NOW.relay
    assert relay is not None
    assert relay.board is not None

    def in_use() -> int:
        assert relay is not None
        assert relay.board is not None
        return sum(words[0] != 0 for words in _pages(relay.board._words))

    before = in_use()
    for _ in range(10):
        group = dist.new_group([0, 1])
        ProcessGroupCollectives(group).barrier()
        dist.destroy_process_group(group)
        del group
    deadline = time.monotonic() + PATIENCE
    while in_use() > before and time.monotonic() < deadline:
        gc.collect()
        relay._star.wake()
        time.sleep(0.01)
    assert in_use() == before


def test_pages_of_destroyed_groups_are_free() -> None:
    """Groups that are made and destroyed again and again need no more pages than one."""
    run_processes(2, _makes_many_groups)
