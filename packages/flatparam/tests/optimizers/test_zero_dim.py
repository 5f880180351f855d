"""Parameters without a dimension, of which the states without one are no parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives, run_threads

KINDS: dict[str, Any] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Scaled(nn.Module):
    """Two numbers beside a layer, in one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shift  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.ones(2, 3) * (rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_the_other_exposure(kind: str, use_orig_params: bool, tmp_path: Path) -> None:
    """From a checkpoint of flat or of original parameters, the other form trains on to the same bits."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def rank(world: Collectives) -> bool:
        pair = []
        for originals in (use_orig_params, not use_orig_params):
            model = FSDP(Scaled(), world, use_orig_params=originals)
            optimizer = KINDS[kind](model.parameters())
            pair.append((model, optimizer, Checkpointer(tmp_path, model, optimizer, ranks=world)))
        (model, optimizer, saving), (other, its_optimizer, loading) = pair
        for _ in range(2):
            step(model, optimizer, world.rank)
        saving.save(2)
        saving.close()
        loading.load()
        for _ in range(2):
            step(model, optimizer, world.rank)
            step(other, its_optimizer, world.rank)
        expected, found = model.state_dict(), other.state_dict()
        return all(torch.equal(found[name], value) for name, value in expected.items())

    assert all(run_threads(2, rank))
