"""What the allocator is asked for is recorded in order, whichever thread of a backward pass asks."""

from typing import Any

import torch
from torch import Tensor

from flatparam_plan.allocations import allocations, mark

NBYTES = 2**20
DEEP = 70
"""torch gives backward passes within more than 60 others a thread of their own."""


class Within(torch.autograd.Function):
    """A function whose backward pass runs another one, and the innermost of which allocates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                Within.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        else:
            del [torch.empty(NBYTES, dtype=torch.uint8)][0]
        return gradients[0], None


def test_threads_are_recorded_in_one_order() -> None:
    """What this thread holds while another one allocates counts in the peak, as when there is one thread."""
    peaks = []
    for depth in (0, DEEP):
        x = torch.ones(1, requires_grad=True)
        y = Within.apply(x, depth).sum()
        with allocations() as found:
            mark()
            held = torch.empty(NBYTES, dtype=torch.uint8)
            y.backward()
            del held
            mark()
        peaks.append(found.peak_between(0, 1))
        assert len(found.places) == 2
        assert found.kept < NBYTES
    assert all(2 * NBYTES <= peak < 3 * NBYTES for peak in peaks)


def test_nothing_is_recorded_of_nothing() -> None:
    """Without allocations there is no peak."""
    with allocations() as found:
        pass
    assert (found.sizes, found.peak, found.kept) == ([], 0, 0)
