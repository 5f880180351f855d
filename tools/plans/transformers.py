"""Transformers of many kinds in ordinary PyTorch: what is planned, and run to see whether the plan holds."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F


@frozen
class Sizes:
    """How large a transformer is."""

    layers: int = 3
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 160
    vocabulary: int = 300
    experts: int = 4
    chosen: int = 2
    latent: int = 32


class RMSNorm(nn.Module):
    """A norm by the root mean square, in fp32."""

    def __init__(self, width: int) -> None:
        """Begin with ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., width]` to the same."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        result: Tensor = self.weight * y.to(x.dtype)
        return result


def turned(x: Tensor) -> Tensor:
    """Rotary positions on `[rows, heads, length, width]`."""
    length, width = x.shape[-2:]
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `memory` makes it cross attention."""

    def __init__(self, sizes: Sizes, *, causal: bool = True, bias: bool = False, rotary: bool = True) -> None:
        """Make the projections."""
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.rotary = sizes.heads, sizes.kv_heads, causal, rotary
        self.head = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.k = nn.Linear(sizes.width, self.kv_heads * self.head, bias=bias)
        self.v = nn.Linear(sizes.width, self.kv_heads * self.head, bias=bias)
        self.o = nn.Linear(sizes.width, sizes.width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        rows, length, width = x.shape
        source = x if memory is None else memory
        q = self.q(x).view(rows, length, self.heads, self.head).transpose(1, 2)
        k = self.k(source).view(rows, -1, self.kv_heads, self.head).transpose(1, 2)
        v = self.v(source).view(rows, -1, self.kv_heads, self.head).transpose(1, 2)
        if self.rotary:
            q, k = turned(q), turned(k)
        if self.kv_heads != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.o(y.transpose(1, 2).reshape(rows, length, width))
        return result


class SwiGLU(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        """Make three matrices."""
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., width]` to the same."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class LlamaBlock(nn.Module):
    """Attention and a gated network, each after an RMS norm."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), SwiGLU(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ParallelBlock(nn.Module):
    """Attention and the network side by side after one norm, with biases."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, bias=True)
        self.up, self.down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        y = self.norm(x)
        result: Tensor = x + self.attention(y) + self.down(F.gelu(self.up(y), approximate="tanh"))
        return result


class MixtureBlock(nn.Module):
    """Attention through a latent, and experts of equal load with a shared one, as in DeepSeek-V3.

    Each expert takes the tokens that are its turn: with balanced routing it computes on as many tokens.
    """

    def __init__(self, sizes: Sizes) -> None:
        """Make the layers; the experts' matrices are three tensors."""
        super().__init__()
        self.sizes = sizes
        self.norm1, self.norm2 = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.q_down = nn.Linear(sizes.width, sizes.latent, bias=False)
        self.q_up = nn.Linear(sizes.latent, sizes.width, bias=False)
        self.kv_down = nn.Linear(sizes.width, sizes.latent, bias=False)
        self.kv_up = nn.Linear(sizes.latent, 2 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.gate = nn.Parameter(torch.randn(sizes.experts, sizes.width, sizes.hidden) / 8)
        self.up = nn.Parameter(torch.randn(sizes.experts, sizes.width, sizes.hidden) / 8)
        self.down = nn.Parameter(torch.randn(sizes.experts, sizes.hidden, sizes.width) / 8)
        self.shared = SwiGLU(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        x = x + self._attend(self.norm1(x))
        y = self.norm2(x)
        result: Tensor = x + self.shared(y) + self._mix(y)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.sizes.heads
        q = self.q_up(self.q_down(x)).view(rows, length, heads, -1).transpose(1, 2)
        k, v = self.kv_up(self.kv_down(x)).view(rows, length, heads, -1).transpose(1, 2).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, width))
        return result

    def _mix(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        flat = x.reshape(-1, sizes.width)
        weights, chosen = self.router(flat).softmax(-1).topk(sizes.chosen, dim=-1)
        order = chosen.reshape(-1).argsort(stable=True)
        rows = order // sizes.chosen
        inputs = flat.index_select(0, rows).view(sizes.experts, -1, sizes.width)
        hidden = F.silu(torch.bmm(inputs, self.gate)) * torch.bmm(inputs, self.up)
        outputs = torch.bmm(hidden, self.down).view(-1, sizes.width)
        outputs = outputs * weights.reshape(-1).index_select(0, order)[:, None]
        return torch.zeros_like(flat).index_add(0, rows, outputs).view_as(x)


class Decoder(nn.Module):
    """Token ids in, the mean cross-entropy of the targets out."""

    def __init__(self, sizes: Sizes, block: type[nn.Module], *, norm: type[nn.Module] = RMSNorm, tied: bool = False):
        """Make `layers` blocks between an embedding and a head."""
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(block(sizes) for _ in range(sizes.layers))
        self.norm = norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, length]` tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Looped(Decoder):
    """A decoder whose one block is applied `layers` times, as in ALBERT."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, length]` tokens."""
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.blocks[0](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class BertBlock(nn.Module):
    """Bidirectional attention and a network, each before a norm, with biases."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the layers."""
        super().__init__()
        self.attention = Attention(sizes, causal=False, bias=True, rotary=False)
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.up, self.down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        x = self.norm1(x + self.attention(x))
        result: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return result


class Bert(nn.Module):
    """An encoder with learned positions and segments, which fills in masked tokens."""

    def __init__(self, sizes: Sizes, length: int = 64) -> None:
        """Make embeddings, blocks and a head with a transform."""
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(length, sizes.width)
        self.segments = nn.Embedding(2, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.blocks = nn.ModuleList(BertBlock(sizes) for _ in range(sizes.layers))
        self.transform = nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.GELU(), nn.LayerNorm(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, length]` tokens."""
        places = torch.arange(tokens.shape[1])
        x = self.norm(self.words(tokens) + self.positions(places) + self.segments(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.transform(x)).flatten(0, 1), targets.flatten())


class CrossBlock(nn.Module):
    """A decoder's block that also attends to an encoder's output."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the layers."""
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(sizes.width) for _ in range(3))
        self.own, self.other = Attention(sizes), Attention(sizes, causal=False, rotary=False)
        self.mlp = SwiGLU(sizes)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same."""
        x = x + self.own(self.norms[0](x))
        x = x + self.other(self.norms[1](x), memory)
        result: Tensor = x + self.mlp(self.norms[2](x))
        return result


class Translator(nn.Module):
    """An encoder and a decoder with one embedding, as in T5."""

    def __init__(self, sizes: Sizes) -> None:
        """Make both halves."""
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.encoder = nn.ModuleList(BertBlock(sizes) for _ in range(sizes.layers))
        self.decoder = nn.ModuleList(CrossBlock(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, length]` tokens."""
        memory = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.embedding(targets)
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Vision(nn.Module):
    """Patches of images through pre-norm blocks to classes, as in ViT."""

    def __init__(self, sizes: Sizes, patch: int = 8, image: int = 32) -> None:
        """Make a convolution that cuts patches, blocks and a head."""
        super().__init__()
        self.cut = nn.Conv2d(3, sizes.width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, sizes.width))
        self.places = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, sizes.width))
        self.blocks = nn.ModuleList(ParallelBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, 10)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, 3, height, width]` images."""
        x = self.cut(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), targets)


class Torchs(nn.Module):
    """torch's own encoder layers with learned positions."""

    def __init__(self, sizes: Sizes, length: int = 64) -> None:
        """Make the layers, without dropout."""
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(length, sizes.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(sizes.width, sizes.heads, sizes.hidden, 0.0, batch_first=True)
            for _ in range(sizes.layers)
        )
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[rows, length]` tokens."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Adapted(nn.Linear):
    """A frozen linear layer beside a trained product of two narrow ones, as in LoRA."""

    def __init__(self, given: nn.Linear, rank: int = 4) -> None:
        """Freeze `given`."""
        super().__init__(given.in_features, given.out_features, bias=False)
        self.weight = nn.Parameter(given.weight.detach(), requires_grad=False)
        self.down = nn.Linear(given.in_features, rank, bias=False)
        self.over = nn.Linear(rank, given.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        result: Tensor = super().forward(x) + self.over(self.down(x))
        return result


def adapted(sizes: Sizes) -> nn.Module:
    """A Llama-like decoder of which only the adapters of queries and values are trained."""
    model = Decoder(sizes, LlamaBlock)
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.q, module.v = Adapted(module.q), Adapted(module.v)
    return model
