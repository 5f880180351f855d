"""Programs whose ranks take different paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .rows import row
from .shared import WIDTH, WORDS, Block, Off, loss_of, off, seeded, sgd, shard, tokens, train


class Branches(nn.Module):
    """A model with a branch that not every batch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.vision, self.block = Block(), Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Tensor, has_image: bool) -> Tensor:
        x = self.embedding(batch)
        return self.head(self.block(self.vision(x) if has_image else x))


def of_images(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """The loss of a rank, of which only rank 0 has images."""
    batch = tokens(rank, step)
    return cross_entropy(model(batch, rank == 0).flatten(0, 1), batch.flip(1).flatten())


class Experts(nn.Module):
    """Experts, one for each word of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(WORDS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for word in batch.unique().tolist():
            x = torch.where((batch == word)[..., None], self.experts[word](x), x)
        return self.head(x)


@row("titan#4777", "A unit is a branch that only one rank's batch takes.")
def optional_unit(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Branches), seeded(Branches)
    fsdp.fully_shard(model.vision)
    fsdp.fully_shard(model.block)
    fsdp.fully_shard(model)
    train(model, [rank], of_images)
    train(plain, [0, 1], of_images)
    return off(model, plain, seeded(Branches))


@row("Automodel#2763", "Only one rank's batch takes a branch, which is inside a unit that all ranks run.")
def optional_branch(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Branches), seeded(Branches)
    fsdp.fully_shard(model)
    train(model, [rank], of_images)
    train(plain, [0, 1], of_images)
    return off(model, plain, seeded(Branches))


@row("transformers#37186", "Experts are units, and each rank's words choose others.")
def experts(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Experts), seeded(Experts)
    for each in model.experts:
        fsdp.fully_shard(each)
    fsdp.fully_shard(model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Experts))


@row("WeatherGenerator#2632", "All experts are one unit, and each rank's words choose others.")
def experts_of_one_unit(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Experts), seeded(Experts)
    fsdp.fully_shard(model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Experts))


@row("verl#5591", "The ranks generate texts of different lengths, and then train.")
def generating(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    words = tokens(rank)
    with torch.no_grad():
        for _ in range(2 + 2 * rank):
            words = torch.cat([words, model(words)[:, -1:].argmax(-1)], 1)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded())


@row("prime-rl#1959", "A rank has one micro-batch, and the other has two.")
def fewer_micro_batches(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for part in range(2 - rank):
        model.set_requires_gradient_sync(part == 1 - rank)
        loss_of(model, rank, part).backward()
    sgd(model).step()
    ((loss_of(plain, 0, 0) + loss_of(plain, 0, 1) + loss_of(plain, 1, 0)) / 2).backward()
    sgd(plain).step()
    return off(model, plain, seeded())


@row("TuFT#121", "There are fewer samples than ranks: a rank has no batch in a step.", own=True)
def no_batch(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    optimizer, beside = sgd(model), sgd(plain)
    for step, samples in enumerate((2, 1, 2)):
        if rank < samples:
            loss_of(model, rank, step).backward()
        (sum(loss_of(plain, each, step) for each in range(samples)) / 2).backward()
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()
    return off(model, plain, seeded())


class Padded(Branches):
    """The same, but whoever has no images runs the branch on zeros, and adds nothing of it."""

    def forward(self, batch: Tensor, has_image: bool) -> Tensor:
        x = self.embedding(batch)
        x = self.vision(x) if has_image else x + 0 * self.vision(torch.zeros_like(x))
        return self.head(self.block(x))


@row("pytorch#148334", "A pass on zeros keeps the ranks together: does it change a gradient?", own=True)
def dummy_pass(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Padded), seeded(Branches)
    fsdp.fully_shard(model.vision)
    fsdp.fully_shard(model.block)
    fsdp.fully_shard(model)
    train(model, [rank], of_images)
    train(plain, [0, 1], of_images)
    return off(model, plain, seeded(Padded))
