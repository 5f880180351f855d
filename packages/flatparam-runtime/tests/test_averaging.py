"""Gradients of a sharded module are means over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives

from .models import Stack, batch
from .worlds import check_same, full_gradients, mean_gradients, run, seeded, sharded


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
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
