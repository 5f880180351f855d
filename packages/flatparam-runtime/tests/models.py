"""The modules that the tests shard. They are small, and every product of their numbers is exact enough to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


class Block(nn.Module):
    """Two linear layers, with 36 elements in their parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Stack(nn.Module):
    """A stem and a head of its own, and blocks between them."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Fragile(nn.Linear):
    """A linear layer that raises its ``error``, if it has one."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


class Coder(Stack):
    """A stack whose halves have methods of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Fragile(WIDTH, WIDTH)

    def encode(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        out: Tensor = self.blocks[0](self.stem(x)) + shift
        return out

    def decode(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[1](x))
        return out


class Chain(nn.Module):
    """Blocks, and no parameter of its own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branches(nn.Module):
    """Two branches; the caller chooses which of them run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, way: str = "lr") -> Tensor:
        for step in way:
            x = self.left(x) if step == "l" else self.right(x)
        return x * self.scale


class TiedBranches(Branches):
    """The right branch uses a weight of the left one."""

    def __init__(self) -> None:
        super().__init__()
        self.right.up.weight = self.left.up.weight


class TiedChain(Chain):
    """All blocks share their first weight, the last two also their second."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.blocks[1].down.weight


class TiedRoot(Stack):
    """The root's own head uses a weight of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[0].up.weight


class Countdown(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = torch.tanh(self.layer(x))
        if times > 1:
            x = self(x, times - 1)
        return x


class Returning(nn.Module):
    """A linear layer whose output is given a different form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


class Reading(nn.Module):
    """A unit that returns an object, and a reader that takes the tensor out of the object again."""

    def __init__(self, form: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = Returning(form)
        self.head = nn.Linear(WIDTH, 2)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.read(self.inner(x)))
        return out


def batch(rank: int = 0, step: int = 0, *, near: nn.Module | None = None) -> Tensor:
    """The input of one rank at one step: (3, WIDTH), on the device of ``near``'s parameters."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    drawn = torch.randn(3, WIDTH, generator=generator)
    return drawn if near is None else drawn.to(next(near.parameters()).device)


def gradient_penalty(module: nn.Module, rank: int) -> Tensor:
    """The loss of a critic: its output, and the norm of its gradient at the input."""
    x = batch(rank).requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    total: Tensor = out.square().mean() + (slope.square().sum(1) - 1.0).square().mean()
    return total
