"""A small model like Llama, the plan of its tensor parallelism, and batches: one of each data-parallel rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
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


class Gathered(torch.autograd.Function):
    """The parts of all ranks along the last dimension but one; each gets back what all have found for its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        padded = F.pad(part, (0, 0, 0, max(sizes) - part.shape[-2]))
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in sizes]
        dist.all_gather(parts, padded.contiguous(), group=group)
        return torch.cat([each[..., :size, :] for each, size in zip(parts, sizes, strict=True)], dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return torch.split(whole, [*ctx.sizes], dim=-2)[dist.get_rank(ctx.group)], None, None


class Attention(nn.Module):
    """Causal attention; each rank has some of the heads, and maybe a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.shared: tuple[Any, Sequence[int]] | None = None
        """The group that shares a sequence, and the lengths of its parts."""
        self.ring: Any = None
        """What attends to the parts of all ranks, which have one length; by default all keys and values are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if self.shared is not None and self.ring is not None:
            found = self.ring(query, key, value, self.shared[0])
        elif self.shared is None:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            group, sizes = self.shared
            begin = sum(sizes[: dist.get_rank(group)])
            gathered: Any = Gathered.apply
            key, value = (gathered(each, group, sizes) for each in (key, value))
            seen = torch.arange(sum(sizes)) <= torch.arange(begin, begin + length).unsqueeze(-1)
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
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
    """Attention and an MLP, or what stands in its place, each behind a norm."""

    def __init__(self, mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.mlp_norm, self.mlp = RMSNorm(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        made: Tensor = x + self.mlp(self.mlp_norm(x))
        return made


class Llama(nn.Module):
    """Embedding, blocks, norm, head; a stage of a pipeline has some of these, and None or nothing for the others."""

    def __init__(self, mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(mlp) for _ in range(LAYERS)])
        self.norm: nn.Module | None = RMSNorm()
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def parallelize(model: nn.Module, mesh: Any, *, sequence: bool = True, loss_parallel: bool = True) -> nn.Module:
    """Spread `model` over the ranks of `mesh`, as torchtitan does; without `sequence`, norms are plain parameters."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
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
    parallelize_module(model, mesh, {name: how for name, how in plan.items() if getattr(model, name) is not None})
    blocks: Any = model.layers
    for block in blocks:
        if not isinstance(block, Block):
            continue
        gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        columns, rows = ["attention.wq", "attention.wk", "attention.wv"], ["attention.wo"]
        inside: dict[str, Any] = {"attention": gather}
        if isinstance(block.mlp, MLP):
            inside["mlp"] = gather
            columns, rows = [*columns, "mlp.w1", "mlp.w3"], [*rows, "mlp.w2"]
        else:
            # It computes with plain tensors: each rank has all tokens, and finds the same.
            inside["mlp"] = PrepareModuleInputOutput(
                input_layouts=(between,),
                desired_input_layouts=(Replicate(),),
                use_local_input=True,
                output_layouts=(Replicate(),),
                desired_output_layouts=(between,),
            )
        inside |= dict.fromkeys(columns, ColwiseParallel())
        inside |= dict.fromkeys(rows, RowwiseParallel(output_layouts=between))
        if sequence:
            inside |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel())
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
