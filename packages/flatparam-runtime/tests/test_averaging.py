"""Gradients of a sharded module are means over ranks."""

from __future__ import annotations

import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives

from .models import Stack, batch
from .worlds import Grads, check_same, full_gradients, mean_gradients, run, seeded, sharded


@each_row("ranks", [1, 2, 3, 4])
def test_gradients_are_means(ranks: int) -> None:
    """Equal data on every rank gives the gradient of one of them, whatever the number of ranks."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=["blocks.0", "blocks.1"])
        module(batch()).sum().backward()
        return full_gradients(module)

    def loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch()).sum()
        return out

    expected = mean_gradients(seeded(Stack), loss, 1)
    for found in run(ranks, step):
        # The factors are powers of two, and so are the sums of equal numbers.
        if ranks in (1, 2, 4):
            check_same(found, expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class Adapted(nn.Module):
    """A frozen layer in a dtype of its own, and small layers that are trained beside it in the same unit."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(8, 32, bias=False, dtype=frozen).requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 32, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        """The frozen layer and what is added to it."""
        base: Tensor = self.base(value.to(self.base.weight.dtype)).float()
        added: Tensor = self.up(self.down(value))
        return base + added


@each_row("frozen", [torch.float16, torch.bfloat16, torch.float64])
@each_row("ranks", [1, 2, 4, 8])
def test_gradients_beside_frozen_parameters_of_another_dtype_are_means(ranks: int, frozen: torch.dtype) -> None:
    """Sums in float16 are divided in two steps; frozen parameters in float16 change nothing for those beside them."""

    def loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(torch.ones(2, 8)).sum()
        return out

    def step(collectives: Collectives) -> Grads:
        module = sharded(lambda: Adapted(frozen), collectives)
        loss(module, collectives.rank).backward()
        return full_gradients(module)

    expected = mean_gradients(seeded(lambda: Adapted(frozen)), loss, 1)
    for found in run(ranks, step):
        # Among eight ranks, sums of odd numbers of equal summands are rounded.
        if ranks < 8:
            check_same(found, expected)
        torch.testing.assert_close(found, expected)
