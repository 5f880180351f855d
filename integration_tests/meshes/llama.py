"""A small model like Llama, the plan of its tensor parallelism, and batches: one of each data-parallel rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 32, 16, 4, 2, 8


class RMSNorm(nn.Module):
    """Its gradient is partial over the ranks of tensor parallelism, if each has a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Attention(nn.Module):
    """Causal attention; each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        made: Tensor = self.wo(found.transpose(1, 2).reshape(batch, length, -1))
        return made


class MLP(nn.Module):
    """SwiGLU, with a bias behind the sum: a parameter of which every rank has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = (
            RMSNorm(),
            Attention(),
            RMSNorm(),
            MLP(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        made: Tensor = x + self.mlp(self.mlp_norm(x))
        return made


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.output(self.norm(x))
        return made


def parallelize(
    model: nn.Module, mesh: Any, *, sequence: bool = True, loss_parallel: bool = True
) -> nn.Module:
    """Spread `model` over the ranks of `mesh`, as torchtitan does; without `sequence`, norms are plain parameters."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between: Any = Shard(1) if sequence else Replicate()
    head: Any = ColwiseParallel(
        input_layouts=between,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    plan = {"embedding": embedding, "output": head, **({"norm": SequenceParallel()} if sequence else {})}
    parallelize_module(model, mesh, plan)
    blocks: Any = model.layers
    for block in blocks:
        gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        inside = {
            **{"attention": gather, "mlp": gather},
            **dict.fromkeys(
                ("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3"), ColwiseParallel()
            ),
            **dict.fromkeys(("attention.wo", "mlp.w2"), RowwiseParallel(output_layouts=between)),
            **(dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()) if sequence else {}),
        }
        parallelize_module(block, mesh, inside)
    return model


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """The tokens of micro-batch `number` of a data-parallel rank, and the tokens that follow."""
    generator = torch.Generator().manual_seed(1000 + 10 * number + rank)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def backward(model: nn.Module, number: int, rank: int, *, loss_parallel: bool = False) -> float:
    """Run forward and backward on a batch, and return the loss."""
    from torch.distributed.tensor.parallel import loss_parallel as parallel

    tokens, targets = batch(number, rank)
    with parallel() if loss_parallel else contextlib.nullcontext():
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        torch.autograd.backward(loss)
    return float(whole(loss.detach()))


def whole(tensor: Any) -> Tensor:
    """Return a tensor, or all of a `DTensor`."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
