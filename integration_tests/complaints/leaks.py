"""Programs that leak, or that make the host work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from .rows import row
from .shared import Leak, Work, calls, leak, loss_of, seeded, shard, whole


@row("pytorch#188174", "The fused AdamW keeps memory of the host in every step.", ranks=1, own=True)
def fused_adamw(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    loss_of(model, rank).backward()

    def step(number: int) -> None:
        optimizer.step()
        schedule.step()

    return leak(step)


@row(
    "pytorch#181761",
    "An average of the weights, at a rate that changes with the step, keeps memory.",
    ranks=1,
)
def warm_average(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())
    average = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def step(number: int) -> None:
        for mine, each in zip(average, model.parameters(), strict=True):
            mine.lerp_(each, 1 / (1 + number))

    return leak(step)


@row("pytorch#178276", "Weights are kept in bounds that change with the step.", ranks=1)
def bounded(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())

    @torch.no_grad()
    def step(number: int) -> None:
        for each in model.parameters():
            each.clamp_(-1 / (1 + number), 1 / (1 + number))

    return leak(step)


@row("pytorch#178301", "A power of the weights is logged, whose exponent changes with the step.", ranks=1)
def logged(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())

    @torch.no_grad()
    def step(number: int) -> None:
        for each in model.parameters():
            each.abs().pow(1 + 1 / (1 + number)).sum()

    return leak(step)


@row("pytorch#176010", "Small weights are set to zero, below a threshold that changes with the step.", ranks=1)
def pruned(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())

    @torch.no_grad()
    def step(number: int) -> None:
        for each in model.parameters():
            each.masked_fill_(each.abs() < 1e-6 / (1 + number), 0.0)

    return leak(step)


@row("pytorch#170367", "Batches of changing length, clipped and stepped.", ranks=1)
def changing_lengths(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        model(torch.zeros(1, 1 + number % 8, dtype=torch.int64)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return leak(step)


@row("pytorch#168255", "The full state is taken in every step.", ranks=1)
def full_states(fsdp: Any, rank: int) -> Leak:
    model = shard(fsdp, seeded())
    return leak(lambda number: whole(model))


def times_the_calls(fsdp: Any, rank: int, **named: Any) -> Work:
    """The calls of Python in a step of AdamW, beside those for plain tensors of the same sizes."""
    model = shard(fsdp, seeded())
    loss_of(model, rank).backward()
    plain = [nn.Parameter(torch.ones(each.numel())) for each in model.parameters()]
    for each in plain:
        each.grad = torch.ones_like(each)
    optimizers = (torch.optim.AdamW(each, **named) for each in (model.parameters(), plain))
    mine, beside = (calls(each.step) for each in optimizers)
    return Work(mine / beside)


@row("pytorch#134191", "A step of the optimizer takes many times that of plain tensors.", ranks=1, own=True)
def slow_step(fsdp: Any, rank: int) -> Work:
    return times_the_calls(fsdp, rank, foreach=True)


@row("Automodel#2888", "The same of the fused optimizer.", ranks=1)
def slow_fused_step(fsdp: Any, rank: int) -> Work:
    return times_the_calls(fsdp, rank, fused=True)
