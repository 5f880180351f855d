"""The reduce-scatter over gloo, which is an all-to-all and a sum in rank order: its bits, in place and out of order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatparam_comm import ReduceOp
from flatparam_comm.testing import run_processes, run_threads

pytestmark = pytest.mark.processes

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMEL = 1001
"""Of an output; odd, so that the slices of the input lie at any alignment."""


def drawn(rank: int, size: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    """The input of one rank: values of which another order of the sum would round to other bits."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(size * NUMEL, generator=generator).to(dtype)


def in_rank_order(rank: int, size: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    """The slice of `rank` of the sum, from the first rank to the last, each sum rounded to the dtype."""
    total, *others = (drawn(other, size, dtype, number).view(size, -1)[rank] for other in range(size))
    for other in others:
        total = total + other
    return total


def _each_dtype(comm: Any) -> None:
    for dtype in FLOATING:
        full = drawn(comm.rank, comm.size, dtype)
        output = torch.full((NUMEL,), torch.nan, dtype=dtype)
        comm.reduce_scatter(output, full).wait()
        assert torch.equal(output, in_rank_order(comm.rank, comm.size, dtype)), dtype
        assert torch.equal(full, drawn(comm.rank, comm.size, dtype)), dtype


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sum_is_in_rank_order(ranks: int) -> None:
    """In every floating dtype the output is the sum in the order of the ranks, bit for bit; the input is unchanged."""
    run_processes(ranks, _each_dtype)


def _in_place(comm: Any) -> None:
    for dtype in FLOATING:
        full = drawn(comm.rank, comm.size, dtype)
        expected = full.clone().view(comm.size, -1)
        expected[comm.rank] = in_rank_order(comm.rank, comm.size, dtype)
        comm.reduce_scatter(full[comm.rank * NUMEL : (comm.rank + 1) * NUMEL], full).wait()
        assert torch.equal(full, expected.view(-1)), dtype


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_in_place(ranks: int) -> None:
    """The output may be the rank's own slice of the input; the other slices stay as they are."""
    run_processes(ranks, _in_place)


def _several(comm: Any) -> None:
    inputs = [drawn(comm.rank, comm.size, torch.float32, number) for number in range(5)]
    outputs = [torch.full((NUMEL,), torch.nan) for _ in inputs]
    outputs[3] = inputs[3].view(comm.size, -1)[comm.rank]
    pending = [
        comm.reduce_scatter(output, full, label=f"number {number}")
        for number, (output, full) in enumerate(zip(outputs, inputs, strict=True))
    ]
    gathered = torch.empty(comm.size)
    pending.append(comm.all_gather(gathered, torch.tensor([float(comm.rank)])))
    for number in (4, 0, 5, 2, 3, 1) if comm.rank else (1, 5, 3, 4, 2, 0):
        pending[number].wait()
        # A second wait does nothing.
        pending[number].wait()
        assert pending[number].done()
    for number, output in enumerate(outputs):
        assert torch.equal(output, in_rank_order(comm.rank, comm.size, torch.float32, number)), number
    assert gathered.tolist() == list(range(comm.size))


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_in_flight_waited_for_out_of_order(ranks: int) -> None:
    """Of several in flight each gets its own sum, once, in whatever order each rank waits for them."""
    run_processes(ranks, _several)


def _bits(comm: Any) -> list[list[float]]:
    found = []
    for dtype in FLOATING:
        output = torch.empty(NUMEL, dtype=dtype)
        comm.reduce_scatter(output, drawn(comm.rank, comm.size, dtype)).wait()
        found.append(output.tolist())
    return found


def test_three_processes_have_the_bits_of_three_threads() -> None:
    """Three ranks over gloo and three threads get the same bits in float32 and float64, as both add in rank order."""
    for gloo, threads in zip(run_processes(3, _bits), run_threads(3, _bits), strict=True):
        assert gloo[:2] == threads[:2]


def _others(comm: Any) -> None:
    for op, expected in ((ReduceOp.MAX, comm.size - 1), (ReduceOp.MIN, 0)):
        output = torch.empty(2)
        comm.reduce_scatter(output, torch.full((2 * comm.size,), float(comm.rank)), op=op).wait()
        assert output.tolist() == [expected] * 2
    whole = torch.empty(2, dtype=torch.int64)
    comm.reduce_scatter(whole, torch.arange(2 * comm.size)).wait()
    assert whole.tolist() == [comm.size * (2 * comm.rank + n) for n in range(2)]


def test_what_is_no_sum_of_floating_numbers() -> None:
    """Maxima, minima and whole numbers go through gloo's own reduce-scatter, to the same meaning."""
    run_processes(3, _others)
