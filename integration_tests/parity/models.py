"""The modules of the zoo: each is small, and each has one thing about it that a sharded model could get wrong.

Nothing in here knows of sharding, of ranks, or of this project: the local model, torch FSDP1's and ours are built from it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Two linear layers and a non-linearity around a residual; the building stone of most of the zoo."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden or width)
        self.down = nn.Linear(hidden or width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """The output layer is the embedding's own weight; both lie in the root unit, with a unit between their two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.block = Block(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Frozen(nn.Module):
    """A frozen bias inside a trainable unit, and a unit that is frozen as a whole between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(6, 5)
        self.first.up.bias.requires_grad_(False)
        self.second = Block(6)
        self.second.requires_grad_(False)
        self.third = Block(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))))


class Gain(nn.Module):
    """One 0-d parameter: smaller than any world of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Uneven(nn.Module):
    """Sizes that no world size divides; a unit of one element; a 0-d parameter beside others; one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.tiny = Gain()
        self.second = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tiny(torch.tanh(self.first(x)))
        return self.second(hidden) * self.scale + self.nothing.sum()


class Level(nn.Module):
    """A unit with parameters of its own before and after the unit inside it."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = inner
        self.after = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


class Branch(nn.Module):
    """Parameters that only some steps, or only some ranks, use: the caller says which.

    ``early`` and ``late`` lie before and after the unit inside, so that the rank that uses ``early`` has the last gradient
    of this unit *after* those of the unit inside, and a rank that does not has it *before* them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.inner = nn.Linear(width, width)
        self.late = nn.Parameter(torch.linspace(-0.5, 0.5, width))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor, *, early: bool, late: bool) -> Tensor:
        if early:
            x = x * self.early
        x = torch.tanh(self.inner(x))
        if late:
            x = x + self.late
        return self.last(x)


class Conditional(nn.Module):
    """A :class:`Branch` between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.branch = Branch(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, *, early: bool, late: bool) -> Tensor:
        return self.head(self.branch(self.first(x), early=early, late=late))


class Twice(nn.Module):
    """One block is called twice in a row, so its parameters must be there, and its gradients be summed, across calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = Block(6)
        self.between = Block(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.between(self.block(self.first(x))))


@dataclasses.dataclass
class Parts:
    """An output that is a dataclass, with a tuple inside."""

    main: Tensor
    rest: tuple[Tensor, dict[str, Tensor]]


class Several(nn.Module):
    """Returns several tensors, each made by a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Linear(width, width)
        self.aside = nn.Linear(width, 2)
        self.deep = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.main(x), (self.aside(x), {"deep": self.deep(x), "input": x}))


class Unused(nn.Module):
    """A unit whose output is not in the loss, and one of whose outputs only some are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.side = Block(5)
        self.several = Several(5)
        self.last = Block(5)
        self.probe = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        side = self.side(x)
        parts = self.several(x)
        out = self.last(parts.main + parts.rest[1]["deep"])
        return {"out": out, "side": side, "probe": self.probe(out), "aside": parts.rest[0]}


class Attention(nn.Module):
    """Causal self-attention of two heads, written out, so that every kernel in it is deterministic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / (width // 2) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer layer, normalised before each half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT with two layers and a tied embedding."""

    def __init__(self, *, vocabulary: int = 17, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """channels_last weights, whose memory order is not that of their shape, and an odd number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x.contiguous(memory_format=torch.channels_last))))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights beside their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


class Recomputed(nn.Module):
    """Blocks under activation checkpointing.

    With ``outside`` the checkpoint is around the block (and so around its unit); without, it is inside the block's own
    forward call, around everything that the block computes.
    """

    def __init__(self, *, reentrant: bool, outside: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.outside = outside
        self.first = nn.Linear(4, 6)
        kind = Block if outside else CheckpointedBlock
        self.blocks = nn.ModuleList(kind(6) for _ in range(3))
        for block in self.blocks:
            block.reentrant = reentrant
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.outside else block(x)
        return self.head(x)


class CheckpointedBlock(Block):
    """A block that recomputes its inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class PreciseBlock(nn.Module):
    """A float32 layer and a float64 bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.bias64 = nn.Parameter(torch.linspace(0, 1, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).double() * self.bias64).float()


class Precise(nn.Module):
    """A unit with parameters of two dtypes, and a root with one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = PreciseBlock(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class Doubt(nn.Module):
    """A float32 and a float64 parameter, of which the second is used on request."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.precise = nn.Parameter(torch.linspace(0.25, 1.0, width, dtype=torch.float64))

    def forward(self, x: Tensor, precise: bool) -> Tensor:
        x = x * self.weight
        return (x.double() * self.precise).float() if precise else x


class Switch(nn.Module):
    """Runs one of two units, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Doubt(4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, left: bool, right: bool, precise: bool = False) -> Tensor:
        if left:
            x = self.left(x, precise)
        return self.right(x) if right else x
