"""A model trains on many ranks, which are threads of this process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads


def _trained(world: Collectives) -> list[float]:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))),
        process_group=world,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [64, pytest.param(256, marks=pytest.mark.long)])
def test_many_ranks_train(size: int) -> None:
    """Ranks with equal batches have the losses of one process, which the last bits of a mean of gradients change."""
    alone, *rest = run_threads(1, _trained)
    assert rest == []
    for losses in run_threads(size, _trained, timeout=None):
        assert losses == pytest.approx(alone, rel=1e-6)
