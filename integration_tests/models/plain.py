"""Two models written with torch alone, in the shape of real ones and wide enough to cross every threshold.

`Llama` has RMS norms, rotary positions, grouped heads, a gated product, and no bias anywhere; its output layer is its
own. `Gpt` has layer norms, learned positions, biases, and an output layer that is the token embedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from integration_tests.models.described import LAYERS, TIES, Model, language


@dataclasses.dataclass(frozen=True)
class Output:
    """What a language model returns; torch FSDP1 looks for tensors in dataclasses, and not in every class."""

    logits: Tensor
    loss: Tensor | None


class Language(nn.Module):
    """A model of tokens: blocks between an embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputes = False

    def embedded(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embedded(input_ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return Output(logits, None)
        return Output(logits, functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))

    def gradient_checkpointing_enable(self) -> None:
        """Compute each block again in the backward pass."""
        self.recomputes = True

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        """The tokens, and after them those that are most likely, one by one."""
        for _ in range(max_new_tokens):
            following = self(input_ids).logits[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, following], dim=1)
        return input_ids


def heads(projected: Tensor, count: int) -> Tensor:
    """(batch, length, width) as (batch, heads, length, width of a head)."""
    return projected.unflatten(-1, (count, -1)).transpose(1, 2)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, width: int, queries: int, keys: int) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys
        narrow = width // queries * keys
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = rotated(heads(self.q_proj(x), self.queries)), rotated(heads(self.k_proj(x), self.keys))
        v = heads(self.v_proj(x), self.keys)
        k, v = (each.repeat_interleave(self.queries // self.keys, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Each pair of elements turned by an angle that grows with the position."""
    length, width = x.shape[-2:]
    pace = 1e4 ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(length)[:, None] * pace).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class LlamaMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, inner: int, queries: int, keys: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RmsNorm(width), RmsNorm(width)
        self.attention = LlamaAttention(width, queries, keys)
        self.mlp = LlamaMlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(Language):
    def __init__(self, vocabulary: int, width: int, inner: int, queries: int, keys: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([LlamaBlock(width, inner, queries, keys) for _ in range(depth)])
        self.norm = RmsNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(small)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class GptBlock(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(each, self.count) for each in self.c_attn(self.ln_1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Gpt(Language):
    def __init__(self, vocabulary: int, width: int, count: int, depth: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([GptBlock(width, count) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(small)
        self.lm_head.weight = self.wte.weight

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(hidden))


def small(module: nn.Module) -> None:
    """Begin with small weights, as language models do."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def prompted(model: Any) -> Tensor:
    """A few tokens after a prompt."""
    return model.generate(torch.arange(5, 17).view(2, 6), max_new_tokens=6)


MODELS = (
    Model(
        "Llama of torch alone",
        lambda: Llama(vocabulary=3001, width=192, inner=640, queries=6, keys=2, depth=2),
        language(3001),
        blocks=("LlamaBlock",),
        layers=("Linear", "Embedding"),
        generate=prompted,
    ),
    Model(
        "GPT of torch alone",
        lambda: Gpt(vocabulary=4101, width=160, count=4, depth=2, length=32),
        language(4101),
        blocks=("GptBlock",),
        layers=("Linear", "Embedding"),
        generate=prompted,
        not_in_torch={(LAYERS, False): TIES, (LAYERS, True): TIES},
    ),
)
