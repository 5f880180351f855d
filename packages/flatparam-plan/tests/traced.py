"""A model of three units and a root, and a step of it that is traced."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from flatparam import FullyShardedDataParallel, trace
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def make() -> nn.Module:
    """Three units and a root."""
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(3)))


def record(world: Collectives, directory: str) -> None:
    """Train two steps, and trace the second."""
    model = FullyShardedDataParallel(make(), process_group=world, auto_wrap_policy=ModuleWrapPolicy({Block}))
    model(torch.ones(2, 8)).sum().backward()
    with trace(model, Path(directory, f"rank{world.rank}.json")):
        model(torch.ones(2, 8)).sum().backward()
