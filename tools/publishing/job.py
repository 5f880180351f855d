"""A small GPT over real text, which is trained a little and then fine-tuned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from gpt.batches import Batches
from gpt.corpus import read_corpus
from gpt.model import GPT
from gpt.shape import PRESETS, Shape
from torch import nn

__all__ = ["batches", "make", "pretrained", "shape_of", "train"]


def shape_of(size: str) -> Shape:
    """The shape that `--size` of the main job chooses."""
    return PRESETS[size].shape


def make(size: str) -> GPT:
    """A GPT with the weights of a new one."""
    torch.manual_seed(0)
    return GPT(shape_of(size))


@cache
def batches(size: str, batch: int) -> Batches:
    """Rows of the standard library's source."""
    return Batches.of(read_corpus(None), batch=batch, context=shape_of(size).context, seed=1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Batches,
    steps: range,
    each: Callable[[], object] = lambda: None,
    part: tuple[int, int] = (0, 1),
) -> float:
    """Train for `steps` on this rank's `part` of each batch, and call `each` after every one; returns the last loss."""
    loss = torch.zeros(())
    for step in steps:
        rows = data.training_part(step, *part)
        loss = model(rows.tokens, rows.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each()
    return loss.item()


def pretrained(size: str, steps: int) -> GPT:
    """A GPT that was trained for `steps`, so that its weights are those of a model and not of chance."""
    model = make(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRESETS[size].lr)
    train(model, optimizer, batches(size, 16), range(1, steps + 1))
    return model
