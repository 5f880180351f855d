"""Ranks that issue different collectives over gloo: an error on each of them, and no process ends inside gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatparam_comm import MismatchError, Pending, ProcessGroupCollectives, ReduceOp
from flatparam_comm.testing import run_processes

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
