"""What is trained: models that return their loss, and the batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from attrs import frozen
from gpt.model import GPT, Block
from gpt.shape import VOCABULARY, Shape
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


class Layers(nn.Module):
    """One unit: `depth` linear layers of `width` with biases, so `2 * depth` parameters."""

    def __init__(self, width: int, depth: int) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, width]` to the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stack(nn.Module):
    """Units one after the other, and the squared distance to a target as loss."""

    def __init__(self, units: int, width: int, depth: int) -> None:
        """Make the units."""
        super().__init__()
        self.units = nn.Sequential(*(Layers(width, depth) for _ in range(units)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of `x` of shape `[rows, width]`."""
        return F.mse_loss(self.units(x), target)


@frozen
class Workload:
    """A model, the class of its units, and what one rank computes on in a step."""

    what: str
    unit: type[nn.Module]
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def batch_of(self, rank: int) -> Batch:
        """The rank's batch; a contender gets the same one in each step."""
        return self.batch(torch.Generator().manual_seed(rank))

    def seeded(self) -> nn.Module:
        """The model with the weights that every contender and every rank begins with."""
        torch.manual_seed(0)
        return self.model()


def stack(units: int, width: int, depth: int, rows: int = 4) -> Workload:
    """A stack of units of `2 * depth` parameters."""

    def batch(generator: torch.Generator) -> Batch:
        x, target = torch.randn(2, rows, width, generator=generator)
        return x, target

    what = f"{units} units of {depth} Linear({width}, {width}), {rows} rows"
    return Workload(what, Layers, lambda: Stack(units, width, depth), batch)


def gpt(layers: int, width: int, heads: int, context: int, rows: int) -> Workload:
    """The main job's model."""
    shape = Shape(layers, width, heads, context)

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(VOCABULARY, (rows, context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    what = f"GPT of {shape.numel / 1e6:.1f} M parameters, {layers} blocks, {rows} rows of {context} tokens"
    return Workload(what, Block, lambda: GPT(shape), batch)


WORKLOADS: Final[dict[str, Workload]] = {
    "small": gpt(layers=8, width=512, heads=8, context=128, rows=2),
    "wide": stack(units=8, width=2048, depth=1),
    "many": stack(units=64, width=16, depth=16),
    # To try what does not depend on size.
    "tiny small": gpt(layers=2, width=32, heads=2, context=8, rows=2),
    "tiny wide": stack(units=3, width=64, depth=1),
    "tiny many": stack(units=4, width=4, depth=4),
}
MEASURED: Final = ("small", "wide", "many")
