"""Right programs, drawn at random: a small model, an engine, a mesh, and how it trains."""

from __future__ import annotations

import random
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from flatparam_certify import Case

WIDTH = 8
TOKENS = 5
VOCABULARY = 11
ENGINES = ("flatparam", "fully_shard", "torch-ddp", "torch-fsdp2", "torch-fsdp1")
MESHES = ("dp_shard=2", "dp_shard=3", "dp_replicate=2,dp_shard=2", "dp_replicate=2", "dp_shard=4")
KINDS = ("linear", "norm", "convolution", "attention", "scaled", "gated", "group norm")


class Block(nn.Module):
    """One layer of some kind, added to its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "convolution": lambda: nn.Conv1d(TOKENS, TOKENS, 3, padding=1),
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            "scaled": lambda: nn.Linear(WIDTH, WIDTH),
            "gated": lambda: nn.Linear(WIDTH, 2 * WIDTH),
            "group norm": lambda: nn.GroupNorm(1, TOKENS),
        }[kind]()
        if kind == "scaled":
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            return x + self.inner(x, x, x, need_weights=False)[0]
        if self.kind == "gated":
            left, right = self.inner(x).chunk(2, -1)
            return x + left * torch.sigmoid(right)
        if self.kind == "scaled":
            return x + torch.tanh(self.inner(x)) * self.scale
        return x + torch.nn.functional.gelu(self.inner(x))


class Drawn(nn.Module):
    """An embedding, blocks and a head; maybe tied, with parameters that are frozen or that nothing uses."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in program.kinds)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=program.has_bias)
        if program.is_tied:
            self.head.weight = self.embedding.weight
        if program.has_unused:
            self.unused = nn.Linear(3, 2)
        if program.frozen is not None:
            self.blocks[program.frozen].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@frozen
class Program:
    """What is drawn from a seed."""

    seed: int
    engine: str
    mesh: str
    kinds: tuple[str, ...]
    is_tied: bool
    has_bias: bool
    has_unused: bool
    frozen: int | None
    wrap: tuple[str, ...]
    rows: int
    settings: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> Program:
        """Draw the program of a seed."""
        draw = random.Random(seed)
        kinds = tuple(draw.choice(KINDS) for _ in range(draw.randint(1, 4)))
        settings = {
            "precisions": draw.choice((["fp32"], ["fp32"], ["fp32", "bf16"])),
            "optimizers": [draw.choice(("sgd", "adamw"))],
            "micro_batches": draw.randint(2, 4),
            "steps": draw.randint(1, 3),
            "groups_of_one": draw.random() < 0.25,
            "seed": seed,
        }
        engine, mesh = draw.choice(ENGINES), draw.choice(MESHES)
        if engine == "torch-fsdp1" and "dp_replicate" in mesh:
            # It is wrong with copies of shard groups of one rank: see test_engines.py.
            mesh = "dp_shard=2"
        return cls(
            seed,
            engine,
            mesh,
            kinds,
            draw.random() < 0.3,
            draw.random() < 0.5,
            draw.random() < 0.3,
            draw.randrange(len(kinds)) if draw.random() < 0.3 else None,
            ("Block",) if draw.random() < 0.5 else (),
            draw.randint(1, 4),
            settings,
        )

    def build(self) -> nn.Module:
        """Return the model."""
        return Drawn(self)

    def batch(self, step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens, and those to predict."""
        tokens = torch.randint(VOCABULARY, (2, self.rows, TOKENS))
        return tokens[0], tokens[1]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy."""
        tokens, targets = batch
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    @property
    def case(self) -> Case:
        """The case to certify."""
        return Case(self.build, self.batch, self.loss)
