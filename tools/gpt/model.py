"""A byte-level GPT in ordinary PyTorch; it knows nothing of ranks or of sharding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .shape import VOCABULARY, Shape


class Block(nn.Module):
    """One transformer block, pre-norm: the unit that is sharded as one.

    With ``recompute`` it keeps only its input for backward. The recomputation lies inside the block, so that it runs
    while the block's parameters are there.
    """

    def __init__(self, shape: Shape, recompute: bool) -> None:
        """Make a block; its weights are initialised by the model."""
        super().__init__()
        self.heads = shape.heads
        self.recompute = recompute
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Map ``x`` of shape ``[rows, length, width]`` to the same shape; ``turns`` is from `turns_of`."""
        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._compute, x, turns, use_reentrant=False)
            return recomputed
        return self._compute(x, turns)

    def _compute(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.attention_in(self.attention_norm(x)), turns))
        y: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return y

    def _attend(self, qkv: Tensor, turns: Tensor) -> Tensor:
        rows, length, _ = qkv.shape
        turns = turns.to(qkv.dtype)
        q, k, v = qkv.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_turned(q, turns), _turned(k, turns), v, is_causal=True)
        return y.transpose(1, 2).reshape(rows, length, -1)


class GPT(nn.Module):
    """Bytes in, scores of the next byte out. The head is tied to the byte embedding."""

    def __init__(self, shape: Shape, recompute: bool = False) -> None:
        """Make a model with weights drawn from torch's global generator."""
        super().__init__()
        self.shape = shape
        self.byte_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape, recompute) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.byte_embedding.weight
        self._initialise()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The scores ``[rows, length, 256]``, or with ``targets`` the mean cross-entropy in nats.

        ``tokens`` and ``targets`` are int64 of shape ``[rows, length]``, ``length`` at most the context.
        """
        x = self.byte_embedding(tokens)
        turns = turns_of(tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        for block in self.blocks:
            x = block(x, turns)
        scores: Tensor = self.head(self.norm(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def _initialise(self) -> None:
        """N(0, 1 / inputs), what is added to the residual stream smaller by the root of how often that happens."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            shrink = math.sqrt(2 * self.shape.layers) if residual else 1.0
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 / shrink)


def turns_of(length: int, head_width: int, device: torch.device) -> Tensor:
    """Cosines and sines ``[2, length, head_width / 2]`` of rotary positions (Su et al., "RoFormer", 2021, eq. 34)."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of ``x[..., length, head_width]`` by its position's angles."""
    cosines, sines = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
