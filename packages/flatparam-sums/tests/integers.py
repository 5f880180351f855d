"""Models and batches of small integers: every product and every sum is exact, so that the order of a sum is of no matter.

The one rounding of a gradient is that of its division by the sum of the weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatparam_comm import Collectives
from flatparam_runtime import Topology, UnitPlan, shard_module, summon_full_params

Batch: TypeAlias = "tuple[Tensor, int]"
"""The inputs of a micro-batch, and its weight."""
Spread: TypeAlias = "Sequence[Sequence[Batch]]"
"""The micro-batches of each rank in one step."""


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Sequential:
    """Return the model; its parameters are -1, 0 and 1."""
    model = nn.Sequential(nn.Linear(2, 3), Block(), Block(), nn.Linear(3, 2))
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=drawn))
    return model


def shard(ranks: Collectives | Topology, **plan: object) -> nn.Sequential:
    """Return the model, each block a unit."""
    model = build()
    topology = ranks if isinstance(ranks, Topology) else Topology(ranks)
    for module in (model[1], model[2], model):
        shard_module(module, UnitPlan(topology, **plan))  # type: ignore[arg-type]
    return model


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss whose gradients are integers."""
    return (model(batch[0]) * torch.tensor([1.0, -2.0])).sum()


def spread(seed: int, ranks: int, most: int = 9) -> Spread:
    """Draw micro-batches, and the rank of each."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found: list[list[Batch]] = [[] for _ in range(ranks)]
    for _ in range(drawn.randint(0, most)):
        weight = drawn.randint(0, 6)
        inputs = torch.randint(-2, 3, (drawn.randint(1, 3), 2), generator=generator).float()
        found[drawn.randrange(ranks)].append((inputs, weight))
    return found


def expected(batches: Spread) -> dict[str, Tensor | None]:
    """Return the gradients that one process has, which does every micro-batch: their weighted mean."""
    model, sums = build(), dict[str, Tensor]()
    everything = [batch for of_rank in batches for batch in of_rank]
    for batch in everything:
        model.zero_grad()
        loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad * batch[1]
    total = math.fsum(weight for _, weight in everything) or 1.0
    return {name: sums[name] / total if name in sums else None for name, _ in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the full gradients of a sharded model."""
    with summon_full_params(model, with_grads=True):
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }


def same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Assert that the gradients are equal to the bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        mine = found[name]
        assert (mine is None) == (value is None), name
        assert mine is None or value is None or torch.equal(mine, value), name
