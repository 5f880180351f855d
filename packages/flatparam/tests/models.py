"""The models that these tests wrap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """Attention and a small perceptron, with residuals."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    """A stack of blocks in a list, an embedding with a tied head, a dict of odds and ends."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.extras = nn.ModuleDict({"norm": nn.LayerNorm(width), "scale": nn.Linear(width, width)})
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extras["scale"](self.extras["norm"](x)))


class Batch(nn.Module):
    """Buffers of every kind beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.mask


def mlp() -> nn.Sequential:
    """Three layers whose sizes no world size divides."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """The same module for the same seed."""
    torch.manual_seed(seed)
    return make()
