"""Programs whose parameters meet plain tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from .rows import row
from .shared import Off, backward, loss_of, off, seeded, sgd, shard, tokens, train


@row("pytorch#153354", "Gradients are clipped while one parameter is not sharded.")
def clipping_beside_ignored(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(), seeded()
    for layer in model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model, ignored_params={model.embedding.weight})
    for each, ranks in ((model, [rank]), (plain, [0, 1])):
        backward(each, ranks)
        if each is model:
            dist.all_reduce(model.embedding.weight.grad.div_(2))
        clip_grad_norm_(each.parameters(), 0.1)
        sgd(each).step()
    return off(model, plain, seeded())


@row(
    "pytorch#171779",
    "Gradients are clipped while only the blocks are sharded, and each rank has the same batch.",
)
def clipping_blocks(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(), seeded()
    for layer in model.layers:
        fsdp.fully_shard(layer)
    for each in (model, plain):
        backward(each, [0])
        clip_grad_norm_(each.parameters(), 0.1)
        sgd(each).step()
    return off(model, plain, seeded())


def by_parts(model: Any, rank: int, step: int = 0) -> Tensor:
    """The loss of a rank, which calls the parts of the model and not the model."""
    x = model.embedding(tokens(rank, step))
    for layer in model.layers:
        x = layer(x)
    return cross_entropy(model.head(x).flatten(0, 1), tokens(rank, step).flip(1).flatten())


@row("trl#4550", "The loss calls the parts of the model, and not the model.")
def calling_parts(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    train(model, [rank], by_parts)
    train(plain, [0, 1], by_parts)
    return off(model, plain, seeded())


@row("accelerate#4219", "A full state of plain tensors is loaded.")
def loading(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    state = {name: each + 1 for name, each in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    return off(model, plain, seeded())


def with_penalty(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """A loss with a penalty on the squares of all weights."""
    return loss_of(model, rank, step) + 0.1 * sum(each.square().sum() for each in model.parameters())


@row("WeatherGenerator#1811", "The loss has a penalty on the weights.")
def penalty(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    train(model, [rank], with_penalty)
    train(plain, [0, 1], with_penalty)
    return off(model, plain, seeded())


@row("transformers#48208", "Each weight is moved, in place, by a tensor of its shape.")
@torch.no_grad()
def moving(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for model_or_plain in (model, plain):
        for each in model_or_plain.parameters():
            each.add_(torch.full(each.shape, 0.5))
    return off(model, plain, seeded())


def with_slope(model: Any, rank: int, step: int = 0) -> Tensor:
    """A loss with a penalty on the slope of the first block, as a critic has."""
    x = model.embedding(tokens(rank, step)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.layers[0](x).square().sum(), x, create_graph=True)
    return loss_of(model, rank, step) + 0.001 * slope.square().sum()


@row("pytorch#187437", "The loss has a penalty on the slope of a block.")
def slope(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    train(model, [rank], with_slope)
    train(plain, [0, 1], with_slope)
    return off(model, plain, seeded())


@row("pytorch#156535", "One optimizer steps sharded blocks and a head that is not, neighbours as one tensor.")
def one_optimizer(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(), seeded()
    for layer in model.layers:
        fsdp.fully_shard(layer)
    for each in (model, plain):
        train(each, [0], optimizer=torch.optim.SGD(each.parameters(), 0.1, momentum=0.9, foreach=True))
    return off(model, plain, seeded())


@row("pytorch#183702", "The rate of learning is a tensor.")
def rate_as_tensor(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for each, ranks in ((model, [rank]), (plain, [0, 1])):
        rate = torch.tensor(0.1)
        train(each, ranks, optimizer=torch.optim.SGD(each.parameters(), rate, momentum=0.9, foreach=True))
    return off(model, plain, seeded())
