"""The models that the programs train."""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    """Two linear layers with a norm between them, around a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.norm(self.up(x))))
        return result


class Model(nn.Module):
    """An input layer, some blocks and an output layer; each forward takes a batch of vectors of eight numbers.

    Args:
        checkpointing: recompute each block in the backward pass; how: "", "reentrant" or "not reentrant".
        twice: use each block twice in a row.
        width: of the blocks.
    """

    def __init__(self, blocks: int, checkpointing: str = "", twice: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.outputs = nn.Linear(width, 8)
        self.checkpointing, self.times = checkpointing, 2 if twice else 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            for _ in range(self.times):
                x = self._call(block, x)
        result: Tensor = self.outputs(x)
        return result

    def _call(self, block: nn.Module, x: Tensor) -> Any:
        if not self.checkpointing:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


WIDTHS: Final = (64, 96, 80, 128, 72, 112)


class Matrix(nn.Linear):
    """A matrix without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class Chain(nn.Module):
    """Matrices of different sizes: the first and the last are the root's, and each of the others is a unit."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(WIDTHS))
        self.first, self.last = (nn.Linear(*pair, bias=False) for pair in (pairs[0], pairs[-1]))
        self.units = nn.Sequential(*(Matrix(*pair) for pair in pairs[1:-1]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.units(self.first(x)))
        return result


def batch(step: int, rank: int, width: int = 8) -> Tensor:
    """What a rank is given in a step."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))
